"""Structured pruning: groups of coupled units, their scores, and the smaller dense network."""

from shaver.structure.choice import Choice, ChoiceOptions, Chooser
from shaver.structure.compaction import CompactReport, compact, compact_with_report
from shaver.structure.damage import unit_damage
from shaver.structure.export import export_onnx
from shaver.structure.gradual import Gradual
from shaver.structure.groups import Group, Groups, Slice, kept_units, mask_units, remaining
from shaver.structure.record import RemovalRecord, removal_record
from shaver.structure.removal import CompactionError, Removal, remove_units
from shaver.structure.scores import score_units, synflow_units, unit_scores
from shaver.structure.search import find_groups
from shaver.structure.surgery import register_surgery

__all__ = [
    "Choice",
    "ChoiceOptions",
    "Chooser",
    "CompactReport",
    "CompactionError",
    "Gradual",
    "Group",
    "Groups",
    "Removal",
    "RemovalRecord",
    "Slice",
    "compact",
    "compact_with_report",
    "export_onnx",
    "find_groups",
    "kept_units",
    "mask_units",
    "register_surgery",
    "remaining",
    "removal_record",
    "remove_units",
    "score_units",
    "synflow_units",
    "unit_damage",
    "unit_scores",
]
