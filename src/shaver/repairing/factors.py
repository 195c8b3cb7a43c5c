"""Repair without data: the conditional mean from a posterior's Kronecker factors.

The Kronecker curvature A ⊗ G of a layer has the second moment A of its inputs. The row o of the weight matrix has the
posterior precision G_oo A + δ_o, and its kept weights K, given that the removed ones R are zero, the mean

    θ_K ← θ_K + (A_KK + Λ)⁻¹ A_KR θ_R,     Λ = δ_o / G_oo .

A is that of the dense network, so the errors of earlier layers are not corrected. It does not contain the mean of the
inputs, so biases stay as they are.
"""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shaver.criteria import PosteriorLike
from shaver.curvature.blocks import KroneckerBlock
from shaver.repairing.conditional import conditional_mean, prior_damping
from shaver.repairing.sites import parameters_of


def factor_blocks(posterior: PosteriorLike | None) -> dict[str, KroneckerBlock]:
    """The Kronecker blocks of a posterior by parameter name; none for a diagonal one."""
    blocks = getattr(getattr(posterior, "curvature", None), "blocks", {})
    return {
        name: block for name, block in blocks.items() if isinstance(block, KroneckerBlock) and block.A.shape[-1] > 1
    }


def tempered_curvature(posterior: PosteriorLike) -> dict[str, Tensor]:
    """The diagonal of H/T by parameter name: the curvature as the posterior counts it, at its temperature T."""
    temperature = getattr(posterior, "temperature", 1.0)
    return {name: values / temperature for name, values in posterior.curvature.diagonal().items()}


@torch.no_grad()
def fit_by_factors(
    model: nn.Module,
    reference: nn.Module,
    kept: Mapping[str, Tensor],
    posterior: PosteriorLike,
    share: float | None = None,
) -> dict[str, tuple[float, float]]:
    """Give each pruned weight with Kronecker factors its conditional mean.

    The posterior was estimated at the weights of the ``reference``, the network before pruning. ``share`` gives Λ as a
    share of the mean squared input, in place of δ/G.

    Returns:
        By parameter name: the squared error of the layer's outputs before and after, as a share of their square.
    """
    own, dense = parameters_of(model), parameters_of(reference)
    delta, diagonal = posterior.delta(), tempered_curvature(posterior)
    errors = {}
    for name, block in factor_blocks(posterior).items():
        if name not in kept or bool(kept[name].all()):
            continue
        mean, masks = block.to_matrix(dense[name].detach()).double(), block.to_matrix(kept[name])
        prior = block.to_matrix(delta[name].expand_as(own[name])).double()
        curvature = block.to_matrix(diagonal[name]).double()
        solved, before, after, total = torch.empty_like(mean), 0.0, 0.0, 0.0
        for group, moment in enumerate(block.A.double()):
            squares = moment.diagonal()
            if share is None:
                damping = prior_damping(prior[group], curvature[group], squares)
            else:
                damping = (share * squares.mean()).expand(1, len(squares))
            damping = damping + 1e-12 * squares.mean() + 1e-30
            solved[group] = conditional_mean(moment, mean[group] @ moment, masks[group], mean[group], damping)
            before += _energy(mean[group] * ~masks[group], moment)
            after += _energy(solved[group] - mean[group], moment)
            total += _energy(mean[group], moment)
        own[name].copy_(block.from_matrix(solved).to(own[name]))
        errors[name] = (before / (total or 1.0), after / (total or 1.0))
    return errors


def _energy(weight: Tensor, moment: Tensor) -> float:
    """Σ (W x)² over the inputs x with this second moment."""
    return float((weight @ moment * weight).sum())
