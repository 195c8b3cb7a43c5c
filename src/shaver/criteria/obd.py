"""OBD, optimal brain damage: S = ½ H_pp θ², the posterior's curvature without the prior (LeCun et al., 1989)."""

from torch import Tensor

from shaver.criteria.registry import Given, criterion
from shaver.criteria.scoring import of_weight


@criterion("obd", needs=["posterior"], degree=2)
def obd(given: Given) -> dict[str, Tensor]:
    """S_p = ½ H_pp θ_p²: how much the loss rises, to second order, at its minimum."""
    curvature = given.posterior.curvature.diagonal()
    return {
        name: 0.5 * of_weight(curvature, name, weight, "curvature") * weight.detach().square()
        for name, weight in given.weights.items()
    }
