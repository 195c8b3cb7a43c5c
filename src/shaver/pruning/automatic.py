"""Automatic sparsity: the evidence that each weight brings, the cost of its removal, and a limit on the total cost.

Weights that bring too little evidence are removed, cheapest first, until the expected rise of the loss reaches a limit.
The limit is a share of ½Σγ with γ = H/(H + δ): weights sampled from the posterior raise the loss by ½Σγ on average, so
the data cannot distinguish networks within that range. A threshold on the evidence alone would treat each weight as if
all others were kept. But thousands of small losses add up, especially if δ was learned before the weights had settled.
A second limit, per sample, applies if δ was not learned: Σγ is then large, and the second-order model is not reliable
that far.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shaver.criteria import PosteriorLike
from shaver.criteria.scoring import of_weight
from shaver.naming import check_number

#: The gain at S = 1, where prior and data have equal weight: ½(1 − log 2) ≈ 0.153 nats.
DEFAULT_NATS = 0.5 * (1 - math.log(2))
#: The share of ½Σγ that removal may cost. It loses at most 0.15 points of accuracy on eight small tasks; see the
#: documentation's page on automatic sparsity.
DEFAULT_BUDGET = 0.05
#: Largest cost of removal in nats per sample.
PER_SAMPLE = 0.02


@dataclass(frozen=True)
class Worth:
    """The value of each weight under a diagonal Laplace posterior, from :func:`weigh`.

    Attributes:
        gains: G = ½ [S − log(P/δ)] per weight: the log evidence gained by keeping it, in nats.
        rises: δθ² + ½hθ² per weight: how much its removal raises loss/T, summed over the data.
        determined: Σγ, the number of weights that the data determine.
        samples: The number of samples, if the posterior has it.
        temperature: T: the posterior counts the data 1/T times.
    """

    gains: Mapping[str, Tensor]
    rises: Mapping[str, Tensor]
    determined: float
    samples: int | None
    temperature: float = 1.0

    def kept(self, nats: float = DEFAULT_NATS, budget: float | None = None) -> dict[str, Tensor]:
        """Masks of the weights that automatic sparsity keeps: those with G ≥ ``nats``, and those beyond the budget.

        Args:
            nats: The evidence, in nats, that a weight must bring to be kept.
            budget: Share of ½Σγ by which removal may raise the expected loss; infinity for no limit. Default:
                :data:`DEFAULT_BUDGET`, and at most :data:`PER_SAMPLE` per sample.

        Raises:
            ValueError: ``nats`` is not finite or ``budget`` is negative.
        """
        check_number("nats, the evidence that a weight must bring to be kept,", nats)
        if budget is not None and budget != math.inf:
            check_number("budget, a share of the posterior's own expected loss,", budget, least=0)
        limit = 0.5 * self.determined * (DEFAULT_BUDGET if budget is None else budget)
        if self.samples is not None and budget is None:
            limit = min(limit, PER_SAMPLE * self.samples)
        names = list(self.rises)
        costs = torch.cat([self.rises[name].flatten().double() for name in names])
        costs[torch.cat([self.gains[name].flatten() for name in names]) >= nats] = math.inf
        order = costs.argsort(stable=True)
        spent = costs[order].cumsum(0)
        kept = torch.ones_like(costs, dtype=torch.bool)
        kept[order[spent.isfinite() & (spent <= limit)]] = False
        pieces = torch.split(kept, [self.rises[name].numel() for name in names])
        return {name: piece.view_as(self.rises[name]) for name, piece in zip(names, pieces, strict=True)}

    def of_removal(self, masks: Mapping[str, Tensor]) -> dict[str, float]:
        """The effect of masks: the change of the log evidence, −ΣG, and the expected rise of the summed loss."""
        return {
            "evidence_change": -_sum_of_removed(self.gains, masks),
            "loss_rise": self.temperature * _sum_of_removed(self.rises, masks),
        }


def weigh(model: nn.Module, posterior: PosteriorLike, names: Iterable[str]) -> Worth:
    """The value of every weight of the named parameters.

    G is the Savage–Dickey ratio log N(0; 0, 1/δ) − log N(0; θ, 1/P) of the prior's and the posterior's density at
    zero, with S = P θ² and P = H + δ. A weight with G < 0 makes the evidence worse.

    θ is the mode under δ, so the negative log likelihood has the slope −δθ there. At zero its second-order model is
    then higher by −θ·(−δθ) + ½hθ² = ½(P + δ)θ². With a temperature T this is the rise of loss/T.

    Raises:
        ValueError: The posterior lacks a weight, or its prior precision is not positive.
    """
    precision, prior = posterior.precision(), posterior.delta()
    parameters = dict(model.named_parameters())
    gains, rises, determined = {}, {}, 0.0
    for name in names:
        weight = parameters[name].detach()
        p = of_weight(precision, name, weight, "precision")
        delta = of_weight(prior, name, weight, "prior precision", broadcast=True)
        if not bool((delta > 0).all()):
            raise ValueError(
                f"the prior precision of {name!r} is not positive everywhere; the evidence needs a proper prior."
            )
        gains[name] = 0.5 * (p * weight.square() - (p / delta).log())
        rises[name] = 0.5 * (p + delta) * weight.square()
        determined += float((1 - delta / p).double().sum())
    samples = getattr(posterior.curvature, "data_size", None)
    return Worth(gains, rises, determined, samples, getattr(posterior, "temperature", 1.0))


def _sum_of_removed(values: Mapping[str, Tensor], masks: Mapping[str, Tensor]) -> float:
    return sum(float(values[name].double().masked_fill(masks[name], 0).sum()) for name in values)
