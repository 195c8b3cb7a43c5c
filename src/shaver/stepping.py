"""How the prior enters an optimizer's step: as a proximal step, which is stable for every δ, or as a gradient."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD, Optimizer

from shaver.invariance import kept_norms, remove_radial
from shaver.shards import local

#: Proximal factors below this become zero. Otherwise weights become subnormal numbers, which slow a CPU down.
NEGLIGIBLE = 1e-4
#: Weights below this size are set to zero every few steps, for the same reason.
VANISHED = 1e-30


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
        warnings.warn(
            f"the optimizer has weight_decay={decay:g} in addition to SpaM's prior, so weights are pulled to zero "
            "twice: pass weight_decay=0.0 (AdamW's default is 0.01).",
            stacklevel=4,
        )


@torch.no_grad()
def apply_prior(
    optimizer: Optimizer,
    delta: Mapping[Tensor, Tensor],
    strength: float,
    scale_free: Mapping[Tensor, int] | None = None,
) -> None:
    """θ ← θ / (1 + η · strength · δ) after the optimizer's step: the proximal step for ½ · strength · θᵀδθ.

    An explicit gradient step diverges where η · strength · δ > 2; this one cannot. η is the optimizer's effective
    step size per weight, see :func:`effective_step`.

    Args:
        optimizer: The optimizer; its own step has just been taken.
        delta: Parameter → precision, broadcastable. Parameters without a precision do not change.
        strength: Factor of the prior in the minimised loss: 1/N for a mean over N samples.
        scale_free: Parameter → number of groups of rows whose norm is kept; see :mod:`shaver.invariance`.
    """
    for group in optimizer.param_groups:
        weights = [p for p in group["params"] if p in delta and p.grad is not None]
        if not weights:
            continue
        precisions = [delta[p] for p in weights]
        steps = [effective_step(optimizer, group, p) for p in weights]
        steps = [local(step) if isinstance(step, Tensor) else step for step in steps]
        if any(isinstance(step, Tensor) for step in steps):
            factors = [d * (step * strength) for d, step in zip(precisions, steps, strict=True)]
        else:  # one step size for the whole group
            factors = list(torch._foreach_mul(precisions, steps[0] * strength))
        torch._foreach_add_(factors, 1.0)
        torch._foreach_reciprocal_(factors)
        for factor in factors:
            F.threshold(factor, NEGLIGIBLE, 0.0, inplace=True)
        with kept_norms(weights, scale_free or {}):
            torch._foreach_mul_([local(p) for p in weights], factors)


@torch.no_grad()
def clear_vanished(weights: Iterable[Tensor]) -> None:
    """Set weights below ``VANISHED`` to zero."""
    for weight in weights:
        own = local(weight)
        own.masked_fill_(own.abs() < VANISHED, 0.0)


def effective_step(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> float | Tensor:
    """How far a constant unit gradient moves a weight per step, once momentum has built up.

    SGD: lr·(1 − dampening)/(1 − momentum). Adam and its variants, RMSprop, Adagrad and Adadelta: lr/(√v̂ + ε) per
    weight, with v̂ as each of them defines it. Any other optimizer: its learning rate.
    """
    lr = float(group["lr"])
    momentum = float(group.get("momentum", 0.0))
    state = optimizer.state.get(parameter, {})
    square: Tensor
    if "exp_avg_sq" in state:  # Adam, AdamW, NAdam, RAdam
        square = state["max_exp_avg_sq"] if group.get("amsgrad") else state["exp_avg_sq"]
        square = square / (1.0 - float(group["betas"][1]) ** float(state["step"]))
    elif "acc_delta" in state:  # Adadelta: both roots have ε inside
        ratio: Tensor = (state["acc_delta"] + group["eps"]).div_(state["square_avg"] + group["eps"])
        return ratio.sqrt_().mul_(lr)
    elif "square_avg" in state:  # RMSprop
        lr /= 1 - momentum
        square = state["square_avg"]
        square = square.addcmul(state["grad_avg"], state["grad_avg"], value=-1) if group["centered"] else square.clone()
    elif "sum" in state:  # Adagrad
        lr /= 1 + (float(state["step"]) - 1) * float(group["lr_decay"])
        square = state["sum"].clone()
    else:
        dampening = float(group.get("dampening", 0.0)) if momentum else 0.0  # torch ignores it without momentum
        return lr * (1 - dampening) / (1 - momentum)
    return square.sqrt_().add_(group["eps"]).reciprocal_().mul_(lr)


@torch.no_grad()
def add_prior_gradient(
    optimizer: Optimizer,
    delta: Mapping[Tensor, Tensor],
    strength: float,
    scale_free: Mapping[Tensor, int] | None = None,
) -> None:
    """Add the gradient of ½ · strength · θᵀδθ before the step: weight decay with its own δ per weight.

    SGD diverges if δ is too large for its step size. There δ is limited to the value whose step ends at zero.
    Optimizers that normalise their gradients need no such limit. ``scale_free`` as in :func:`apply_prior`: there the
    part of the gradient that would change the norm is left out.
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
                gradient.add_(pull.to(gradient.dtype))


def unscale(optimizer: Optimizer, scaler: Any) -> None:
    """Undo the loss scale of the gradients before something is added to them, unless that has been done already."""
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
