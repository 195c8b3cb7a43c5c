"""Repair: what is left of a pruned network makes up for what was removed, without labels or training."""

from shaver.repairing.damage import output_damage
from shaver.repairing.norms import recalibrate
from shaver.repairing.repaired import Repaired, RepairedLayer, repair
from shaver.repairing.sweep import sweep

__all__ = ["Repaired", "RepairedLayer", "output_damage", "recalibrate", "repair", "sweep"]
