"""H, the curvature of the negative log likelihood, as a diagonal or as Kronecker factors, for any model."""

from shaver.curvature.blocks import Block, Curvature, DiagonalBlock, KroneckerBlock
from shaver.curvature.estimation import estimate
from shaver.curvature.online import OnlineCurvature
from shaver.curvature.rules import register_rule
from shaver.curvature.uses import Dense, Outer, Rows, Shift, Use

__all__ = [
    "Block",
    "Curvature",
    "Dense",
    "DiagonalBlock",
    "KroneckerBlock",
    "OnlineCurvature",
    "Outer",
    "Rows",
    "Shift",
    "Use",
    "estimate",
    "register_rule",
]
