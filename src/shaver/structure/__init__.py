"""Structured pruning: groups of coupled units, their scores, and the smaller dense network that is left."""

from shaver.structure.groups import Group, Groups, Slice, remaining

__all__ = ["Group", "Groups", "Slice", "remaining"]
