"""Criteria without data or posterior: magnitude, |θ|, and independent uniform scores."""

import torch
from torch import Tensor

from shaver.criteria.registry import Given, criterion


@criterion("magnitude")
def magnitude(given: Given) -> dict[str, Tensor]:
    """|θ|, the weight's absolute value."""
    return {name: weight.detach().abs() for name, weight in given.weights.items()}


@criterion("random")
def random(given: Given) -> dict[str, Tensor]:
    """Uniform numbers from a separate generator: the same for the same seed, on every device."""
    generator = torch.Generator().manual_seed(given.seed)
    return {
        name: torch.rand(weight.shape, generator=generator, dtype=torch.float64).to(weight.device)
        for name, weight in given.weights.items()
    }
