"""Structured pruning: groups of coupled units, their scores, and the smaller dense network that is left."""

from shaver.structure.choosing import Choosing, Chosen, choose_units
from shaver.structure.finding import find_groups
from shaver.structure.groups import Group, Groups, Slice, remaining
from shaver.structure.masking import mask_units
from shaver.structure.scores import score_units, synflow_units, unit_scores

__all__ = [
    "Choosing",
    "Chosen",
    "Group",
    "Groups",
    "Slice",
    "choose_units",
    "find_groups",
    "mask_units",
    "remaining",
    "score_units",
    "synflow_units",
    "unit_scores",
]
