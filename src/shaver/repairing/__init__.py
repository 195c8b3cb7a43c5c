"""Repair: adjust the remaining weights of a pruned network to compensate for the removed ones, without labels."""

from shaver.repairing.damage import output_damage
from shaver.repairing.joint import joint_fit
from shaver.repairing.norms import recalibrate
from shaver.repairing.repaired import Repaired, RepairedLayer, repair
from shaver.repairing.sweep import sweep

__all__ = ["Repaired", "RepairedLayer", "joint_fit", "output_damage", "recalibrate", "repair", "sweep"]
