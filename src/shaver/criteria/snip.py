"""SNIP: |θ · ∂L/∂θ|, the first-order effect of removing a weight (Lee et al., 2019)."""

import torch
from torch import Tensor

from shaver.criteria.registry import Given, criterion
from shaver.criteria.scoring import differentiable


@criterion("snip", needs=["batches"])
def snip(given: Given) -> dict[str, Tensor]:
    """|θ · ∂L/∂θ| with the loss L averaged over all samples of all batches."""
    gradient = mean_gradient(given)
    return {name: (weight.detach() * gradient[name]).abs() for name, weight in given.weights.items()}


def mean_gradient(given: Given) -> dict[str, Tensor]:
    """∂L/∂θ of the prunable weights, zero for a weight that the loss does not use. ``.grad`` does not change."""
    sums = [torch.zeros_like(weight) for weight in given.weights.values()]
    samples = 0
    with differentiable(given.weights) as weights:
        for batch in given.batches():
            loss, count = given.loss(batch)
            samples += count
            for total, gradient in zip(sums, torch.autograd.grad(loss, weights, allow_unused=True), strict=True):
                if gradient is not None:
                    total += gradient
    return {name: total / samples for name, total in zip(given.weights, sums, strict=True)}
