"""Predictions under the posterior: samples of the weights, and outputs with their uncertainty.

The posterior of the weights is N(θ, Σ). A *sampled* prediction averages over a few networks sampled from it. A
*linearised* prediction replaces the network by its first-order expansion around θ, f(x) + J(x)(θ' − θ), whose outputs
are Gaussian with covariance J Σ Jᵀ. The GGN is the exact curvature of that expansion.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import jacrev, vmap
from torch.utils._pytree import tree_map

from shaver.batches import batch_size_of, outputs_in
from shaver.curvature.capture import Functional, undisturbed
from shaver.evidence.basis import Basis
from shaver.likelihoods import Classification, Likelihood

if TYPE_CHECKING:
    from shaver.evidence.posterior import Posterior

METHODS = ("linearised", "sampled")
#: Largest number of Jacobian entries in memory at a time: 256 MB in float32.
JACOBIAN_LIMIT = 2**26


@dataclass(frozen=True)
class Prediction:
    """The posterior's prediction for a batch.

    Attributes:
        mean: Class probabilities for a classification; the outputs f for a regression or your own likelihood.
        outputs: f, the network's outputs: at θ if linearised, averaged over the sampled networks if sampled.
        variance: Variance of each output, shaped like ``outputs``: the uncertainty that more data would remove. The
            noise σ² of a regression is not included.
        covariance: Covariance of the outputs per sample, ``(batch, K, K)`` with K outputs; None if sampled.
    """

    mean: Tensor
    outputs: Tensor
    variance: Tensor
    covariance: Tensor | None = None


def draws(posterior: "Posterior", count: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Sample weights from the posterior, one network at a time: θ + Σ^½ ε."""
    if count < 1:
        raise ValueError(f"the number of samples must be 1 or more, not {count!r}.")
    generator = torch.Generator().manual_seed(seed)
    bases = list(_projected(posterior))
    for _ in range(count):
        drawn = {}
        for name, basis, projected in bases:
            theta = posterior.theta[name]
            noise = torch.randn(theta.shape, generator=generator, dtype=theta.dtype).to(theta.device)
            drawn[name] = theta + basis.covariance_root(noise.unsqueeze(0), projected)[0]
        yield drawn


def sampled(
    posterior: "Posterior", model: nn.Module, x: Any, likelihood: Likelihood, samples: int, seed: int
) -> Prediction:
    """The mean prediction of networks sampled from the posterior, and the variance of their outputs."""
    mean = total = squares = torch.zeros(())
    first: Tensor | None = None
    with undisturbed(model), torch.no_grad():
        for weights in draws(posterior, samples, seed):
            outputs = _outputs(model, weights, x)
            first = outputs if first is None else first  # summing differences from it avoids cancellation
            mean = mean + _expected(likelihood, outputs) / samples
            total, squares = total + (outputs - first), squares + (outputs - first).square()
    assert first is not None
    variance = (squares - total.square() / samples) / max(samples - 1, 1)
    return Prediction(mean, first + total / samples, variance.clamp_min(0))


def linearised(posterior: "Posterior", model: nn.Module, x: Any, likelihood: Likelihood) -> Prediction:
    """Gaussian outputs with covariance J Σ Jᵀ; class probabilities by MacKay's probit approximation.

    softmax(f / √(1 + π/8 · diag(J Σ Jᵀ))). The Jacobian is computed for a few samples and a few parameters at a time.
    """
    bases = {name: (basis, projected) for name, basis, projected in _projected(posterior)}
    with undisturbed(model):
        with torch.no_grad():
            outputs = _outputs(model, posterior.theta, x)
        count, size = batch_size_of(x), outputs[0].numel()
        covariance = outputs.new_zeros(count, size, size)
        for names in _groups(posterior.theta, JACOBIAN_LIMIT // size):
            numbers = size * sum(posterior.theta[name].numel() for name in names)
            step = max(1, JACOBIAN_LIMIT // max(numbers, 1))
            for start in range(0, count, step):
                piece = slice(start, min(start + step, count))
                jacobian = _jacobian(model, posterior.theta, names, tree_map(lambda t, at=piece: t[at], x))
                for name, rows in jacobian.items():
                    basis, projected = bases[name]
                    flat = basis.covariance_root(rows.flatten(0, 1), projected).reshape(len(rows), size, -1)
                    covariance[piece] += flat @ flat.mT
    variance = covariance.diagonal(dim1=1, dim2=2).reshape(outputs.shape)
    return Prediction(_expected(likelihood, outputs, variance), outputs, variance, covariance)


def _projected(posterior: "Posterior") -> Iterator[tuple[str, Basis, Tensor]]:
    for name, basis in posterior.bases().items():
        yield name, basis, basis.project(posterior.delta_of(name))


def _expected(likelihood: Likelihood, outputs: Tensor, variance: Tensor | None = None) -> Tensor:
    """E[y] of Gaussian outputs."""
    if not isinstance(likelihood, Classification):
        return outputs
    if variance is not None:
        outputs = outputs / (1 + math.pi / 8 * variance).sqrt()
    return outputs.softmax(likelihood.class_dim)


def _outputs(model: nn.Module, weights: Mapping[str, Tensor], x: Any) -> Tensor:
    own = dict(model.named_parameters())
    known = {name: weight.to(own[name].dtype) for name, weight in weights.items()}
    arguments, named = ((), dict(x)) if isinstance(x, Mapping) else (x if isinstance(x, tuple) else (x,), {})
    return Functional(model, lambda network, batch: outputs_in(network(*arguments, **named))).at(known, x)


def _jacobian(model: nn.Module, theta: Mapping[str, Tensor], names: list[str], x: Any) -> dict[str, Tensor]:
    """∂f/∂θ of the named parameters: ``(batch, outputs, *shape)`` each."""

    def single(weights: dict[str, Tensor], sample: Any) -> Tensor:
        return _outputs(model, {**theta, **weights}, tree_map(lambda t: t.unsqueeze(0), sample)).flatten()

    rows: Callable[..., dict[str, Tensor]] = vmap(jacrev(single), in_dims=(None, 0))
    try:
        return rows({name: theta[name] for name in names}, x)
    except RuntimeError as error:
        error.add_note('If vmap cannot run this network, posterior.predict(x, method="sampled") needs no Jacobian.')
        raise


def _groups(theta: Mapping[str, Tensor], limit: int) -> Iterator[list[str]]:
    """Groups of parameters with at most ``limit`` weights each, or a single larger parameter."""
    group: list[str] = []
    numbers = 0
    for name, weight in theta.items():
        if group and numbers + weight.numel() > limit:
            yield group
            group, numbers = [], 0
        group.append(name)
        numbers += weight.numel()
    yield group
