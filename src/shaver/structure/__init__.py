"""Structured pruning: groups of coupled units, their scores, and the smaller dense network that is left."""

from shaver.structure.choosing import Choosing, Chosen, choose_units
from shaver.structure.compacting import CompactReport, compact, compact_with_report
from shaver.structure.compaction import Compacted, CompactionError, remove_units
from shaver.structure.export import export_onnx
from shaver.structure.finding import find_groups
from shaver.structure.gradual import Gradual
from shaver.structure.groups import Group, Groups, Slice, remaining
from shaver.structure.masking import kept_units, mask_units
from shaver.structure.plan import Plan, plan_of
from shaver.structure.scores import score_units, synflow_units, unit_scores
from shaver.structure.surgery import register_surgery

__all__ = [
    "Choosing",
    "Chosen",
    "CompactReport",
    "Compacted",
    "CompactionError",
    "Gradual",
    "Group",
    "Groups",
    "Plan",
    "Slice",
    "choose_units",
    "compact",
    "compact_with_report",
    "export_onnx",
    "find_groups",
    "kept_units",
    "mask_units",
    "plan_of",
    "register_surgery",
    "remaining",
    "remove_units",
    "score_units",
    "synflow_units",
    "unit_scores",
]
