"""H: what the data say about each weight."""

from shaver.curvature.blocks import Block, Curvature, DiagonalBlock, KroneckerBlock

__all__ = ["Block", "Curvature", "DiagonalBlock", "KroneckerBlock"]
