"""Magnitude: |θ|."""

from torch import Tensor

from shaver.criteria.registry import Given, criterion


@criterion("magnitude")
def magnitude(given: Given) -> dict[str, Tensor]:
    """|θ|, the weight's absolute value."""
    return {name: weight.detach().abs() for name, weight in given.weights.items()}
