"""Learning δ: maximise the evidence at fixed weights, by fixed point or by the paper's gradient.

In log δ the evidence is concave, for diagonal and Kronecker curvature and every kind of prior, so both methods reach
the same maximum. With γ_g = Σ_{p∈g} γ_p, q_g = Σ_{p∈g} δ_p θ_p² and n_g weights in a group, its derivative is
½ (γ_g − q_g). The fixed point uses two updates:

* MacKay's δ_g ← δ_g γ_g / q_g, but only half the step in log δ. The whole step oscillates where γ is small. If the
  groups are independent given the other factor, the half step never overshoots and at least halves the distance.
* EM's δ_g ← δ_g n_g / (n_g − γ_g + q_g). It is shorter and can never lower the evidence. Where Proposition 1 couples
  the groups, it replaces MacKay's update whenever that would lower the evidence.

Proposition 1 mixes the δ of a tensor before the determinant: δ̂ = M δ, where rows and columns of M sum to 1. So
Σ log δ̂ ≥ Σ log δ, with equality only if all δ are equal. Where the data say nothing (H = 0), the true evidence does not
depend on δ, but the projected one falls as the δ of a tensor become different. That keeps δ from telling weights apart.
"""

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from shaver.batches import check_network
from shaver.curvature.blocks import Curvature, DiagonalBlock, row_pieces
from shaver.evidence.basis import Basis, DiagonalBasis, make_bases
from shaver.evidence.posterior import Posterior, occam
from shaver.naming import check_name, shown
from shaver.priors import Factor, Grouping, Prior, make_prior
from shaver.ranks import ALONE

#: The fixed point stops when no log δ changes by more than this.
TOLERANCE = 1e-5

_STEPS = {"fixed_point": 30, "gradient": 100}


def improve(
    prior: Prior,
    curvature: Curvature,
    theta: Mapping[str, Tensor],
    *,
    method: str = "fixed_point",
    steps: int | None = None,
    lr: float = 0.1,
    temperature: float = 1.0,
    projected: bool = True,
) -> Posterior:
    """Update the prior's δ in place to maximise the evidence at these weights. The evidence never falls.

    Example:
        >>> prior = make_prior("parameter", parameters)
        >>> posterior = improve(prior, curvature, parameters)
        >>> posterior.log_evidence

    Args:
        prior: Its values are updated, within its bounds.
        curvature: H, summed over the data.
        theta: The weights by name, at which H was estimated.
        method: ``"fixed_point"`` (in closed form where there is one) or ``"gradient"``, the paper's Adam on log δ.
        steps: Maximum number of steps. Default: 30 for the fixed point, which stops once converged; 100 for Adam.
        lr: Adam's learning rate in log δ.
        temperature: T: H counts 1/T times.
        projected: For Kronecker curvature where δ differs within a tensor. True: the evidence of the paper's
            Proposition 1, which holds δ of a tensor together. False: γ_p = h_p / (h_p + δ_p) with h = diag(A ⊗ G), so
            that each δ follows its own weight.

    Returns:
        The posterior under the improved prior.
    """
    default = _STEPS[check_name("method", method, _STEPS)]
    steps = default if steps is None else steps
    posterior = Posterior(curvature, prior, theta, temperature)  # checks that the three fit together
    for name, weights in posterior.theta.items():
        if not bool(weights.isfinite().all()):
            raise FloatingPointError(f"the weights {name!r} hold NaN or infinity; training has diverged.")
    for factor in prior.factors:
        if not bool(((factor.values > 0) & factor.values.isfinite()).all()):
            raise FloatingPointError(f"the prior precision of {factor.key!r} is not positive and finite everywhere.")
    bases = make_bases(curvature, temperature)
    for factors in prior.parts:
        part = _Part(prior, factors, bases, posterior.theta)
        if part.is_coupled and not projected:
            apart: dict[str, Basis] = {
                name: DiagonalBasis(name, DiagonalBlock(curvature.blocks[name].diagonal()), temperature)
                for name in part.bases
            }
            part = _Part(prior, factors, apart, posterior.theta)
        if method == "gradient":
            _ascend(part, steps, lr)
        elif part.is_closed:
            _closed(part)
        else:
            _iterate(part, steps)
    prior.fix_gauge()
    return Posterior(curvature, prior, theta, temperature)


def fit_prior(
    model: nn.Module, curvature: Curvature, prior: str | Grouping = "layer", *, temperature: float = 1.0
) -> Posterior:
    """The posterior of a network that was trained elsewhere, with δ chosen by the evidence.

    Use this instead of a guessed precision or N · weight decay when SpaM did not train the network. It works for a
    network trained without weight decay too.

    Example:
        >>> curvature = shaver.curvature.estimate(model, loader)
        >>> posterior = shaver.evidence.fit_prior(model, curvature)
        >>> scores = shaver.score(model, "opd", posterior=posterior)

    Args:
        model: The network at the weights where ``curvature`` was estimated.
        curvature: H and the data's log likelihood.
        prior: Which weights share a δ: ``"scalar"``, ``"layer"``, ``"unit"`` or a function; see
            :func:`shaver.priors.make_prior`. ``"parameter"`` overrates every weight that training has left near zero.
        temperature: The data count 1/T times.
    """
    check_network(model, "fit_prior")
    if not isinstance(curvature, Curvature):
        raise TypeError(f"curvature is what shaver.curvature.estimate returns, not {shown(curvature)}.")
    theta = {name: parameter for name, parameter in model.named_parameters() if name in curvature.blocks}
    return improve(make_prior(prior, theta), curvature, theta, temperature=temperature)


def optimal_precision(h: Tensor, theta: Tensor) -> Tensor:
    """The δ of highest evidence for each weight, under diagonal curvature h.

    δ* = 2h/θ² / (h + √(h² + 4h/θ²)), computed as (√h/|θ|) · 2/(r + √(r² + 4)) with r = √h |θ|, which neither
    cancels nor overflows. It is infinite if only θ is 0, zero if only h is 0, and NaN if both are: then every δ has the
    same evidence.
    """
    root, size = h.sqrt(), theta.abs()
    r = root * size
    denominator = torch.hypot(r, r.new_tensor(2.0)).add_(r).mul_(size)
    return root.mul_(2).div_(denominator)


def shrink_factor(h: Tensor, delta0: Tensor, delta1: Tensor, power: float = 1.0) -> Tensor:
    """The factor (h + δ0)/(h + δ1) by which the posterior mean shrinks when δ changes from δ0 to δ1; at most 1.

    Args:
        h: Diagonal of H.
        delta0: The precision for which θ is the mode, broadcastable to ``h``.
        delta1: The new precision.
        power: Share of the move in log θ: 1 is all of it, 0.5 half.
    """
    factor = ((h + delta0) / (h + delta1)).clamp_(max=1.0)
    return factor if power == 1 else factor.pow_(power)


class _Sums(NamedTuple):
    """γ, q = δθ² and the number of weights, per group of one factor."""

    gamma: Tensor
    scatter: Tensor
    weights: Tensor


class _Part:
    """The part of the evidence that depends on one independent set of factors."""

    def __init__(
        self, prior: Prior, factors: Sequence[Factor], bases: Mapping[str, Basis], theta: Mapping[str, Tensor]
    ) -> None:
        self.prior, self.factors = prior, factors
        self.ranks = next((factor.ranks for factor in factors if factor.ranks), ALONE)
        self.bases = {name: bases[name] for name in factors[0].layouts}
        self.theta = {name: theta[name] for name in self.bases}
        uniform = all(layout.uniform for factor in factors for layout in factor.layouts.values())
        # Only Proposition 1 couples the groups. One δ for a whole tensor is exact, and a diagonal has no coupling.
        self.is_coupled = not uniform and not all(isinstance(b, DiagonalBasis) for b in self.bases.values())
        # Rounding error of the evidence in float32; about one nat for ten million weights.
        self.rounding = torch.finfo(factors[0].values.dtype).eps * sum(t.numel() for t in self.theta.values())
        layouts = list(factors[0].layouts.values())
        self.is_closed = (
            len(factors) == 1
            and len(layouts) == 1
            and layouts[0].size == layouts[0].shape
            and not self.is_coupled
            and isinstance(next(iter(self.bases.values())), DiagonalBasis)
        )

    def evaluate(self, with_value: bool = True) -> tuple[float, list[_Sums]]:
        """This part's evidence and each factor's sums at the current δ, tensor by tensor to save memory."""
        value = 0.0
        sums = [_Sums(*(torch.zeros_like(factor.values) for _ in range(3))) for factor in self.factors]
        for name, basis in self.bases.items():
            theta, delta = self.theta[name], self.prior.delta_of(name)
            layouts = [factor.layouts[name] for factor in self.factors]
            projected = basis.project(delta, factors=len(layouts))
            if with_value:
                value += float(occam(basis, delta, projected, theta))
            scatter = delta * theta.square()
            gammas = basis.gamma_sums(delta, projected, layouts)
            for totals, layout, gamma in zip(sums, layouts, gammas, strict=True):
                terms = (gamma, layout.reduce(scatter), layout.reduce(scatter.new_ones(())))
                for total, term in zip(totals, terms, strict=True):
                    total += term.to(total)
        for factor, totals in zip(self.factors, sums, strict=True):
            factor.ranks.sum_(totals)
        return value, sums

    def move(self, factor: Factor, log_values: Tensor) -> None:
        """Give a factor new values, clamped so that every product δ stays within the prior's bounds."""
        low, high = self.prior.bounds
        for other in self.factors:
            if other is not factor:
                logs = other.values.log()
                least, most = (float(logs.min()), float(logs.max())) if logs.numel() else (math.inf, -math.inf)
                least, most = factor.ranks.range(least, most)
                low, high = low - least, high - most
        factor.values = log_values.clamp(low, high).exp().to(factor.values.dtype)


def _closed(part: _Part) -> None:
    (factor,) = part.factors
    ((name, basis),) = part.bases.items()
    assert isinstance(basis, DiagonalBasis)
    low, high = (torch.tensor(bound, dtype=torch.float64).exp().item() for bound in part.prior.bounds)
    before, theta = factor.values, part.theta[name]
    found = torch.empty_like(before)
    for rows in row_pieces(theta):
        delta = optimal_precision(basis.eigenvalues(rows), theta[rows]).to(before.dtype)
        found[rows] = torch.where(delta.isnan(), before[rows], delta).clamp_(low, high)
    factor.values = found


def _iterate(part: _Part, steps: int) -> None:
    """Half MacKay steps for one factor after the other; EM steps where those would lower the evidence."""
    boldness = 1.0  # 1: MacKay, 0: EM; in between if the coupling allows no more
    coupled = part.is_coupled
    value, sums = part.evaluate(coupled)
    slack = part.rounding if coupled else 0.0
    span = part.prior.bounds[1] - part.prior.bounds[0]
    for _ in range(steps):
        farthest = 0.0
        for i, factor in enumerate(part.factors):
            before, now = factor.values, sums[i]
            logs = before.log()
            em = -torch.log((now.weights - now.gamma + now.scatter) / now.weights)
            mackay = (0.5 * (now.gamma.clamp_min(0).log() - now.scatter.log())).clamp_(-span, span)
            mackay = torch.where(mackay.isnan(), 0.0, mackay)  # γ = θ = 0: every δ has the same evidence
            if coupled:  # γ is a difference here and may be negative; use EM there
                mackay = torch.where(now.gamma > 1e-6 * now.weights, mackay, em)
            part.move(factor, logs + (em + boldness * (mackay - em) if coupled else mackay))
            new_value, sums = part.evaluate(coupled)
            if coupled and new_value < value - slack:
                part.move(factor, logs + em)
                new_value, sums = part.evaluate()
                boldness /= 4
            else:
                boldness = min(1.0, 2 * boldness)
            value = new_value
            if logs.numel():
                farthest = max(farthest, float((factor.values.log() - logs).abs().max()))
        if part.ranks.range(0.0, farthest)[1] < TOLERANCE:
            break


def _ascend(part: _Part, steps: int, lr: float) -> None:
    """Adam on log δ, as in the paper; undone if the evidence ends lower than it started."""
    start = [factor.values for factor in part.factors]
    logs = [factor.values.log() for factor in part.factors]
    optimizer = torch.optim.Adam(logs, lr=lr, maximize=True)
    first, sums = part.evaluate()
    value = first
    for _ in range(steps):
        for log, now in zip(logs, sums, strict=True):
            log.grad = (0.5 * (now.gamma - now.scatter)).to(log)
        optimizer.step()
        for factor, log in zip(part.factors, logs, strict=True):
            part.move(factor, log)
            log.copy_(factor.values.log())  # Adam continues from inside the bounds
        value, sums = part.evaluate()
    if value < first:
        for factor, values in zip(part.factors, start, strict=True):
            factor.values = values
