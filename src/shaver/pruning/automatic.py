"""Automatic sparsity: what each weight is worth to the evidence, what its removal costs, and how much may be spent.

A weight goes if the evidence does not pay for it, cheapest first, until the expected rise of the loss has reached a
share of what the posterior itself expects: a weight drawn from it raises the loss by ½γ on average, γ = H/(H + δ), so
that ½Σγ is what the data cannot tell apart. The threshold alone judges each weight as if the others stayed; thousands
of small losses add up, most where δ was learned before the weights had settled. Nor may it cost more than a little for
each sample: where δ was not learned Σγ is large, and the second-order model is not to be trusted that far.
"""

import math
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor, nn

from shaver.criteria import PosteriorLike
from shaver.criteria.scoring import of_weight

#: The gain at S = 1, where prior and data weigh the same: ½(1 − log 2) ≈ 0.153 nats.
DEFAULT_NATS = 0.5 * (1 - math.log(2))
#: How much of ½Σγ removal may cost; chosen on validation splits, see the documentation's page on pruning.
DEFAULT_BUDGET = 0.25
#: Nats a sample that removal may cost at most.
A_SAMPLE = 0.02


def evidence_gain(model: nn.Module, posterior: PosteriorLike, names: Iterable[str]) -> dict[str, Tensor]:
    """G = ½ [S − log(P/δ)] of each weight: the log evidence gained by keeping it, in nats.

    This is the Savage–Dickey ratio log N(0; 0, 1/δ) − log N(0; θ, 1/P) of the prior's and the posterior's density at
    zero, with S = P θ² and P = H + δ. A weight with G < 0 makes the evidence worse.

    Raises:
        ValueError: The posterior does not know a weight, or its prior precision is not positive.
    """
    precision, prior = posterior.precision(), posterior.delta()
    parameters = dict(model.named_parameters())
    gains = {}
    for name in names:
        weight = parameters[name].detach()
        p = of_weight(precision, name, weight, "precision")
        delta = of_weight(prior, name, weight, "prior precision", broadcast=True)
        if not bool((delta > 0).all()):
            raise ValueError(
                f"the prior precision of {name!r} is not positive everywhere; the evidence needs a proper prior."
            )
        gains[name] = 0.5 * (p * weight.square() - (p / delta).log())
    return gains


def loss_rise(model: nn.Module, posterior: PosteriorLike, names: Iterable[str]) -> dict[str, Tensor]:
    """δθ² + ½hθ² of each weight: by how much its removal raises the loss summed over the data, to second order.

    θ is the mode under δ, so the negative log likelihood alone has the slope −δθ there; its second-order model at
    zero is then −θ·(−δθ) + ½hθ² higher, which is ½(P + δ)θ². With a temperature T it is the rise of loss/T.
    """
    precision, prior = posterior.precision(), posterior.delta()
    parameters = dict(model.named_parameters())
    rises = {}
    for name in names:
        weight = parameters[name].detach()
        p = of_weight(precision, name, weight, "precision")
        rises[name] = 0.5 * (p + of_weight(prior, name, weight, "prior precision", broadcast=True)) * weight.square()
    return rises


def unpaid(
    model: nn.Module, posterior: PosteriorLike, names: Iterable[str], nats: float, budget: float | None
) -> dict[str, Tensor]:
    """Which weights automatic sparsity keeps: True where G ≥ ``nats``, or where the budget was spent before.

    Args:
        model: The network at the posterior's mode.
        posterior: Of its weights.
        names: The parameters that may lose weights.
        nats: The evidence that a weight must bring.
        budget: Share of ½Σγ by which removal may raise the expected loss, infinite for no limit; None is
            :data:`DEFAULT_BUDGET`, and no more than :data:`A_SAMPLE` for each sample.

    Raises:
        ValueError: ``nats`` is not finite or ``budget`` is negative.
    """
    if not math.isfinite(nats):
        raise ValueError(f"nats is the evidence a weight must bring to be kept, a finite number, not {nats!r}.")
    if budget is not None and not budget >= 0:
        raise ValueError(f"budget is a share of the posterior's own expected loss, at least 0, not {budget!r}.")
    names = list(names)
    gains, rises = evidence_gain(model, posterior, names), loss_rise(model, posterior, names)
    precision, prior = posterior.precision(), posterior.delta()
    gamma = sum(float((1 - prior[name] / precision[name]).double().sum()) for name in names)
    limit = 0.5 * gamma * (DEFAULT_BUDGET if budget is None else budget)
    samples = getattr(posterior.curvature, "data_size", None)
    if samples is not None and budget is None:
        limit = min(limit, A_SAMPLE * samples)
    flat = torch.cat([rises[name].flatten().double() for name in names])
    flat[torch.cat([gains[name].flatten() for name in names]) >= nats] = math.inf
    order = flat.argsort(stable=True)
    kept = torch.ones_like(flat, dtype=torch.bool)
    spent = flat[order].cumsum(0)
    kept[order[spent.isfinite() & (spent <= limit)]] = False
    pieces = torch.split(kept, [rises[name].numel() for name in names])
    return {name: piece.view_as(rises[name]) for name, piece in zip(names, pieces, strict=True)}


def removed_sum(values: dict[str, Tensor], masks: Mapping[str, Tensor]) -> float:
    """The sum of ``values`` over the weights that the masks remove, in float64."""
    return sum(float(values[name].double().masked_fill(masks[name], 0).sum()) for name in values)
