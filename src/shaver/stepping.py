"""How the prior enters an optimizer's step: as a proximal step, which is stable for every δ, or as a gradient."""

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

from shaver.curvature.blocks import PIECE, row_pieces, summed
from shaver.evidence import shrink_factor
from shaver.invariance import kept_norms, remove_radial
from shaver.shards import local

#: Proximal factors below this become zero. Otherwise weights become subnormal numbers, which slow a CPU down.
NEGLIGIBLE = 1e-4
#: Weights below this size are set to zero every few steps, for the same reason.
VANISHED = 1e-30
#: The prior moves a weight matrix by at most this share of its norm when δ is updated, and each of its rows by at most
#: this share in a step of an optimizer that divides by the size of the gradients. Without these limits, the prior
#: erases a transformer before it has learned anything; see the page on defaults.
LONGEST_UPDATE, LONGEST_STEP = 0.1, 0.01
#: Relative change of the learning rate below which the prior's step uses the factors of an earlier step.
SAME = 0.01
_ONE = torch.ones((), device="cpu")


def check_optimizers(optimizers: Sequence[Optimizer], parameters: Iterable[Tensor]) -> None:
    """Refuse optimizers that hold none of the parameters, and warn about weight decay in addition to the prior.

    Raises:
        ValueError: The optimizers belong to another model.
    """
    own = {id(p) for p in parameters}
    groups = [g for optimizer in optimizers for g in optimizer.param_groups if any(id(p) in own for p in g["params"])]
    if not groups:
        raise ValueError(
            f"{', '.join(type(o).__name__ for o in optimizers)} holds no trainable parameter of SpaM's model: was the "
            "model wrapped, copied or moved after the optimizer was created? Create the optimizer after that."
        )
    if decay := max(group.get("weight_decay") or 0.0 for group in groups):
        is_sgd = all(isinstance(optimizer, SGD) for optimizer in optimizers)
        instead = f"and weight_decay={decay:g} to SpaM" if is_sgd else "(AdamW's default is 0.01)"
        warnings.warn(
            f"the optimizer has weight_decay={decay:g} in addition to SpaM's prior, so weights are pulled to zero "
            f"twice: pass weight_decay=0.0 to the optimizer {instead}.",
            stacklevel=4,
        )


class Factors:
    """1/(1 + cδ) of small weights. It is kept while δ stays the same and c, which follows the learning rate, nearly so.

    Keeping it saves most of the time of the prior's step, because δ changes only every few steps.
    """

    def __init__(self) -> None:
        self._kept: dict[Tensor, tuple[Tensor, int, float, Tensor]] = {}

    def of(self, weight: Tensor, precision: Tensor, c: float) -> Tensor:
        """The factor; c is within :data:`SAME` of the one given."""
        kept = self._kept.get(weight)
        if kept is None or kept[0] is not precision or kept[1] != precision._version or abs(kept[2] - c) > SAME * c:
            kept = precision, precision._version, c, _proximal(torch.add(_ONE, precision, alpha=c))
            self._kept[weight] = kept
        return kept[3]


@torch.no_grad()
def apply_prior(
    optimizer: Optimizer,
    delta: Mapping[Tensor, Tensor],
    strength: float,
    scale_free: Mapping[Tensor, int] | None = None,
    initial: float = 0.0,
    factors: Factors | None = None,
) -> None:
    """θ ← θ / (1 + η · strength · δ) after the optimizer's step: the proximal step for ½ · strength · θᵀδθ.

    An explicit gradient step diverges where η · strength · δ > 2; this one cannot. η is the optimizer's effective
    step size per weight, see :func:`effective_step`. In Adam it is large for weights with small gradients, so there a
    row of a matrix moves by at most :data:`LONGEST_STEP` of its norm.

    Args:
        optimizer: The optimizer; its own step has just been taken.
        delta: Parameter → precision, broadcastable. Parameters without a precision do not change.
        strength: Factor of the prior in the minimised loss: 1/N for a mean over N samples.
        scale_free: Parameter → number of groups of rows whose norm δ leaves as it is; see :mod:`shaver.invariance`.
        initial: Precision that also acts on the norm of scale-free weights, as weight decay does.
        factors: The factors of earlier steps, which may be used again.
    """
    scale_free, factors = scale_free or {}, Factors() if factors is None else factors
    for group in optimizer.param_groups:
        together: list[tuple[Tensor, Tensor]] = []  # small weights that share one step size, and their factors
        for weight in group["params"]:
            precision = delta.get(weight) if weight.grad is not None else None
            if precision is None:
                continue
            own = local(weight)
            if isinstance(optimizer, SGD) and own.numel() <= PIECE and weight not in scale_free:
                together.append((own, factors.of(weight, precision, _shared_step(group) * strength)))
                continue
            if weight in scale_free and initial:
                _pull(optimizer, group, weight, precision.new_tensor(initial), strength)
            with kept_norms([weight], scale_free):
                _pull(optimizer, group, weight, precision, strength)
        if together:
            torch._foreach_mul_(*map(list, zip(*together, strict=True)))


def _pull(optimizer: Optimizer, group: Mapping[str, Any], weight: Tensor, precision: Tensor, strength: float) -> None:
    """The proximal step of one weight."""
    own = local(weight)
    precision = precision.expand_as(own)
    for rows in row_pieces(own):
        rate, size = _rate_and_size(optimizer, group, weight, rows)
        part, pull = own[rows], precision[rows] * (rate * strength)
        if size is None:
            part.mul_(_proximal(pull.add_(1.0)))
            continue
        factor = torch.threshold_(size.div_(pull.add_(size)), NEGLIGIBLE, 0.0)
        if part.ndim > 1:
            _multiply(part, factor)
        else:
            part.mul_(factor)


@torch.no_grad()
def shrink(
    weight: Tensor,
    h: Tensor,
    deltas: tuple[Tensor, Tensor],
    *,
    temperature: float,
    power: float,
    total: Callable[..., list[float]],
) -> None:
    """Move a weight towards the posterior mean after an update of δ, see :func:`shaver.evidence.shrink_factor`.

    A matrix moves by at most :data:`LONGEST_UPDATE` of its norm.

    Args:
        weight: Changed in place.
        h: Diagonal of H.
        deltas: δ before and after the update, broadcastable.
        temperature: T: H counts 1/T times.
        power: Share of the move in log θ.
        total: Sums values over the ranks that hold rows of the weight.
    """
    old, new = (delta.expand_as(h) for delta in deltas)
    factor = torch.empty_like(weight)
    for rows in row_pieces(h):
        factor[rows] = shrink_factor(h[rows] / temperature, old[rows], new[rows], power)
    if weight.ndim > 1:
        moved, size = total(
            float(summed(lambda w, f: (w * (1 - f)).double().square(), weight, factor)),
            float(summed(lambda w: w.double().square(), weight)),
        )
        longest = LONGEST_UPDATE * math.sqrt(size / moved) if moved else 1.0
        if longest < 1:
            factor = 1 - longest * (1 - factor)
    weight.mul_(factor)


def embeddings_of(model: nn.Module) -> set[Tensor]:
    """Embedding tables, which :func:`shrink` would harm.

    The curvature of a word is measured only in batches that contain it, so its δ rises and falls. Each rise would
    shrink the word's weights, and no fall would restore them.
    """
    tables = (module for module in model.modules() if isinstance(module, nn.Embedding | nn.EmbeddingBag))
    return {parameter for table in tables for parameter in table.parameters(recurse=False)}


def _proximal(divisor: Tensor) -> Tensor:
    """1/divisor in place; 0 where that is negligible."""
    return torch.threshold_(divisor.reciprocal_(), NEGLIGIBLE, 0.0)


def _multiply(weight: Tensor, factor: Tensor) -> None:
    """``weight *= factor``, but no row moves by more than ``LONGEST_STEP`` of its norm."""
    rows = tuple(range(1, weight.ndim))
    move = torch.addcmul(weight, weight, factor, value=-1.0)  # away from the weight
    size = torch.linalg.vector_norm(weight, dim=rows, keepdim=True)
    longest = LONGEST_STEP * size / torch.linalg.vector_norm(move, dim=rows, keepdim=True).clamp_min_(1e-30)
    weight.addcmul_(move, longest.clamp_(max=1.0), value=-1.0)


@torch.no_grad()
def clear_vanished(weights: Iterable[Tensor]) -> None:
    """Set weights below ``VANISHED`` to zero."""
    for weight in weights:
        own = local(weight)
        torch.hardshrink(own, VANISHED, out=own)


def effective_step(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, rows: slice | EllipsisType = ...
) -> float | Tensor:
    """How far a constant unit gradient moves a weight per step, once momentum has built up.

    SGD: lr·(1 − dampening)/(1 − momentum). Adam and its variants, RMSprop, Adagrad and Adadelta: lr/(√v̂ + ε) per
    weight, with v̂ as each of them defines it. Any other optimizer: its learning rate.

    Args:
        optimizer: The optimizer.
        group: Its group that has the parameter.
        parameter: The parameter. If it is sharded, the result has this rank's rows.
        rows: Only these rows. Default: all.
    """
    rate, size = _rate_and_size(optimizer, group, parameter, rows)
    return rate if size is None else size.reciprocal_().mul_(rate)


def _rate_and_size(
    optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor, rows: slice | EllipsisType
) -> tuple[float, Tensor | None]:
    """The effective step is rate/size for each weight, or the rate where the size is None. The size is a new tensor."""
    lr, eps = float(group["lr"]), float(group.get("eps", 0.0))
    state = optimizer.state.get(parameter, {})

    def of(name: str) -> Tensor:
        return local(state[name])[rows]

    if "exp_avg_sq" in state:  # Adam, AdamW, NAdam, RAdam
        unbiased = math.sqrt(1.0 - float(group["betas"][1]) ** float(state["step"]))
        square = of("max_exp_avg_sq" if group.get("amsgrad") else "exp_avg_sq")
        return lr * unbiased, square.sqrt().add_(eps * unbiased)
    if "acc_delta" in state:  # Adadelta: both roots have ε inside
        return lr, (of("square_avg") + eps).div_(of("acc_delta") + eps).sqrt_()
    if "square_avg" in state:  # RMSprop
        lr /= 1 - float(group["momentum"])
        square = of("square_avg")
        if group["centered"]:
            square = square.addcmul(of("grad_avg"), of("grad_avg"), value=-1)
        return lr, square.sqrt().add_(eps)
    if "sum" in state:  # Adagrad
        return lr / (1 + (float(state["step"]) - 1) * float(group["lr_decay"])), of("sum").sqrt().add_(eps)
    return _shared_step(group), None


def _shared_step(group: Mapping[str, Any]) -> float:
    """The effective step size of an optimizer that has the same one for all weights of a group."""
    momentum = float(group.get("momentum", 0.0))
    dampening = float(group.get("dampening", 0.0)) if momentum else 0.0  # torch ignores it without momentum
    return float(group["lr"]) * (1 - dampening) / (1 - momentum)


@torch.no_grad()
def add_prior_gradient(
    optimizer: Optimizer,
    delta: Mapping[Tensor, Tensor],
    strength: float,
    scale_free: Mapping[Tensor, int] | None = None,
    initial: float = 0.0,
) -> None:
    """Add the gradient of ½ · strength · θᵀδθ before the step: weight decay with its own δ per weight.

    SGD diverges if δ is too large for its step size, so δ is limited to the value whose step ends at zero. Optimizers
    that normalise their gradients need no such limit. ``scale_free`` and ``initial`` are as in :func:`apply_prior`: the
    part of δ's gradient that would change the norm of scale-free weights is left out.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in delta and p.grad is not None:
                gradient, counted = local(p.grad), delta[p] * strength
                if isinstance(optimizer, SGD) and (step := effective_step(optimizer, group, p)):
                    counted.clamp_(max=1.0 / step)
                pull = counted * local(p)
                if scale_free and p in scale_free:
                    remove_radial(pull, local(p), scale_free[p])
                    pull.add_(local(p), alpha=initial * strength)
                gradient.add_(pull.to(gradient.dtype))


def unscale(optimizer: Optimizer, scaler: Any) -> None:
    """Divide the gradients by the loss scale, unless that has been done already."""
    state = scaler._per_optimizer_states[id(optimizer)]["stage"]
    if state.name == "READY":
        scaler.unscale_(optimizer)


def take_step(optimizer: Optimizer, scaler: Any = None) -> bool:
    """Take the optimizer's own step, through a gradient scaler if there is one. False if the scaler skipped it."""
    if scaler is None or not scaler.is_enabled():
        optimizer.step()
        return True
    scaler.step(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return not any(bool(value.item()) for value in found.values())
