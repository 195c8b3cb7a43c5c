"""Automatic sparsity: what each weight is worth to the evidence, and what its removal costs."""

import math
from collections.abc import Iterable, Mapping

from torch import Tensor, nn

from shaver.criteria import PosteriorLike
from shaver.criteria.scoring import of_weight

#: The gain at S = 1, where prior and data weigh the same: ½(1 − log 2) ≈ 0.153 nats.
DEFAULT_NATS = 0.5 * (1 - math.log(2))


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


def check_nats(nats: float) -> float:
    """A finite number of nats a weight, or a ``ValueError``."""
    if not math.isfinite(nats):
        raise ValueError(f"nats is the evidence a weight must bring to be kept, a finite number, not {nats!r}.")
    return nats


def removed_sum(values: dict[str, Tensor], masks: Mapping[str, Tensor]) -> float:
    """The sum of ``values`` over the weights that the masks remove, in float64."""
    return sum(float(values[name].double().masked_fill(masks[name], 0).sum()) for name in values)
