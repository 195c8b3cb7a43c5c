"""Structured pruning: groups of coupled units, their scores, and the smaller dense network that is left."""

from shaver.structure.choosing import Choosing, Chosen, choose_units
from shaver.structure.compacting import CompactReport, compact, compact_with_report
from shaver.structure.compaction import Compacted, CompactionError, remove_units
from shaver.structure.finding import find_groups
from shaver.structure.gradual import Gradual
from shaver.structure.groups import Group, Groups, Slice, remaining
from shaver.structure.masking import kept_units, mask_units
from shaver.structure.scores import score_units, synflow_units, unit_scores

__all__ = [
    "Choosing",
    "Chosen",
    "CompactReport",
    "Compacted",
    "CompactionError",
    "Gradual",
    "Group",
    "Groups",
    "Slice",
    "choose_units",
    "compact",
    "compact_with_report",
    "find_groups",
    "kept_units",
    "mask_units",
    "remaining",
    "remove_units",
    "score_units",
    "synflow_units",
    "unit_scores",
]
