"""Former names of :mod:`shaver.structure.choice`, until every room uses the new ones."""

from shaver.structure.choice import ChoiceOptions as Choosing
from shaver.structure.choice import Chooser

__all__ = ["Chooser", "Choosing"]
