"""OPD, optimal posterior damage, P_pp θ² with P = H + δ; OBD, optimal brain damage, ½ H_pp θ² (LeCun et al., 1989)."""

from torch import Tensor

from shaver.criteria.registry import Given, criterion
from shaver.criteria.scoring import of_weight


@criterion("opd", needs=["posterior"], degree=2)
def opd(given: Given) -> dict[str, Tensor]:
    """S_p = P_pp θ_p²: twice the rise of the negative log posterior when the weight is set to zero.

    P_pp is the exact diagonal of H + δ, also for Kronecker-factored curvature: diag(A) ⊗ diag(G) + δ.
    """
    precision = given.posterior.precision()
    weights = {name: weight.detach() for name, weight in given.weights.items()}
    # Multiplying by θ twice needs one large temporary less than θ².
    return {name: (of_weight(precision, name, w, "precision") * w).mul_(w) for name, w in weights.items()}


@criterion("obd", needs=["posterior"], degree=2)
def obd(given: Given) -> dict[str, Tensor]:
    """S_p = ½ H_pp θ_p²: how much the loss rises, to second order, at its minimum. The prior does not count."""
    curvature = given.posterior.curvature.diagonal()
    return {
        name: 0.5 * of_weight(curvature, name, weight, "curvature") * weight.detach().square()
        for name, weight in given.weights.items()
    }
