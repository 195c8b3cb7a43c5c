"""Former names of :mod:`shaver.structure.record`, until every room uses the new ones."""

from shaver.structure.record import RemovalRecord as Plan
from shaver.structure.record import removal_record as plan_of
from shaver.structure.record import resize, shapes_after

__all__ = ["Plan", "plan_of", "resize", "shapes_after"]
