"""SNIP, |θ · ∂L/∂θ| (Lee et al., 2019), and GraSP with absolute value, |θ · H g| (Wang et al., 2020)."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from shaver.criteria.registry import Given, criterion

#: From the loss of a batch and the weights to one derivative per weight; None for a weight that the loss does not use.
_Derivative = Callable[[Tensor, list[nn.Parameter]], Sequence[Tensor | None]]


@criterion("snip", needs=["batches"])
def snip(given: Given) -> dict[str, Tensor]:
    """|θ · ∂L/∂θ|, the first-order effect of removing a weight on the mean loss L over all samples."""
    sums, samples = _summed(given, _gradient)
    return {name: (weight.detach() * (sums[name] / samples)).abs() for name, weight in given.weights.items()}


@criterion("grasp", needs=["batches"])
def grasp(given: Given) -> dict[str, Tensor]:
    """|θ · H g|, the effect of removing a weight on the gradient's norm, for the mean loss over all samples.

    Two passes: one for g, one for the Hessian-vector products ∂(∂L/∂θ · g)/∂θ, summed over the batches. H is the
    Hessian over the prunable weights. It is never formed.
    """
    gradients, samples = _summed(given, _gradient)
    direction = [gradient / samples for gradient in gradients.values()]

    def product(loss: Tensor, weights: list[nn.Parameter]) -> Sequence[Tensor | None]:
        first = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
        parts = [(g * d).sum() for g, d in zip(first, direction, strict=True) if g is not None]
        slope = torch.stack(parts).sum() if parts else loss.detach()
        if not slope.requires_grad:  # a loss that is linear in the weights has no curvature
            return [None] * len(weights)
        return torch.autograd.grad(slope, weights, allow_unused=True)

    with sdpa_kernel(SDPBackend.MATH):  # the fused attention kernels have no second derivative
        products, _ = _summed(given, product)
    return {name: (weight.detach() * products[name] / samples).abs() for name, weight in given.weights.items()}


def _gradient(loss: Tensor, weights: list[nn.Parameter]) -> Sequence[Tensor | None]:
    return torch.autograd.grad(loss, weights, allow_unused=True)


def _summed(given: Given, derivative: _Derivative) -> tuple[dict[str, Tensor], int]:
    """A derivative of the loss summed over all samples, by weight, and their number. ``.grad`` does not change.

    Frozen weights get ``requires_grad`` for the time of the call.
    """
    sums = {name: torch.zeros_like(weight) for name, weight in given.weights.items()}
    weights = list(given.weights.values())
    flags = [weight.requires_grad for weight in weights]
    samples = 0
    try:
        for weight in weights:
            weight.requires_grad_(True)
        for batch in given.batches():
            loss, count = given.loss(batch)
            samples += count
            for total, part in zip(sums.values(), derivative(loss, weights), strict=True):
                if part is not None:
                    total += part
    finally:
        for weight, flag in zip(weights, flags, strict=True):
            weight.requires_grad_(flag)
    return sums, samples
