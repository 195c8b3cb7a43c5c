"""GraSP with absolute value: |θ · H g|, the effect of removing a weight on the gradient's norm (Wang et al., 2020)."""

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from shaver.criteria.registry import Given, criterion
from shaver.criteria.scoring import differentiable
from shaver.criteria.snip import mean_gradient


@criterion("grasp", needs=["batches"])
def grasp(given: Given) -> dict[str, Tensor]:
    """|θ · H g| with g and H the gradient and the Hessian of the same mean loss over all batches.

    Two passes: one for g, one for the Hessian-vector products ∂(∂L/∂θ · g)/∂θ, summed over the batches. H is the
    Hessian over the prunable weights. It is never formed.
    """
    direction = mean_gradient(given)
    sums = [torch.zeros_like(weight) for weight in given.weights.values()]
    samples = 0
    # The fused attention kernels have no second derivative.
    with differentiable(given.weights) as weights, sdpa_kernel(SDPBackend.MATH):
        for batch in given.batches():
            loss, count = given.loss(batch)
            samples += count
            first = torch.autograd.grad(loss, weights, create_graph=True, allow_unused=True)
            pairs = [(g, d) for g, d in zip(first, direction.values(), strict=True) if g is not None]
            slope = torch.stack([(g * d).sum() for g, d in pairs]).sum() if pairs else loss.detach()
            if not slope.requires_grad:  # a loss that is linear in the weights has no curvature
                continue
            for total, product in zip(sums, torch.autograd.grad(slope, weights, allow_unused=True), strict=True):
                if product is not None:
                    total += product
    return {
        name: (weight.detach() * total / samples).abs()
        for (name, weight), total in zip(given.weights.items(), sums, strict=True)
    }
