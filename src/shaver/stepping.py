"""The prior in an optimizer's step: as a proximal step that is stable for every δ, or as a plain gradient."""

import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import SGD, Optimizer

from shaver.shards import local

#: A weight that the proximal step makes smaller than this share becomes zero: subnormal numbers slow a CPU down.
NEGLIGIBLE = 1e-4
#: Weights below this size become zero now and then, for the same reason: shrinking without a gradient ends there.
VANISHED = 1e-30


def check_optimizers(optimizers: Sequence[Optimizer], parameters: Iterable[Tensor]) -> None:
    """Refuse optimizers that hold none of the parameters, and warn of weight decay beside the prior.

    Raises:
        ValueError: They are another model's.
    """
    own = {id(p) for p in parameters}
    groups = [g for optimizer in optimizers for g in optimizer.param_groups if any(id(p) in own for p in g["params"])]
    if not groups:
        raise ValueError(
            f"{', '.join(type(o).__name__ for o in optimizers)} holds no trainable parameter of the model that SpaM "
            "trains: was the model wrapped, copied or moved after the optimizer was made?"
        )
    if decay := max(group.get("weight_decay") or 0.0 for group in groups):
        warnings.warn(
            f"the optimizer has weight_decay={decay:g} and SpaM's prior takes its place, so that weights are pulled to "
            "zero twice: pass weight_decay=0.0 (AdamW's default is 0.01).",
            stacklevel=4,
        )


@torch.no_grad()
def apply_prior(optimizer: Optimizer, delta: Mapping[Tensor, Tensor], strength: float) -> None:
    """θ ← θ / (1 + η · strength · δ) after the optimizer's step: the proximal step for ½ · strength · θᵀδθ.

    An explicit gradient step diverges where η · strength · δ > 2; this one cannot. η is the effective step size of
    the optimizer for each weight, see :func:`effective_step`.

    Args:
        optimizer: Has just stepped.
        delta: Parameter → precision, broadcastable; parameters without one are left alone.
        strength: What a unit of δ counts in the loss that is minimised, 1/N for a mean over N samples.
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
        torch._foreach_mul_([local(p) for p in weights], factors)


@torch.no_grad()
def clear_vanished(weights: Iterable[Tensor]) -> None:
    """Set weights that have all but vanished to zero."""
    for weight in weights:
        own = local(weight)
        own.masked_fill_(own.abs() < VANISHED, 0.0)


def effective_step(optimizer: Optimizer, group: Mapping[str, Any], parameter: Tensor) -> float | Tensor:
    """How far a constant unit gradient moves a weight in one step, once momentum has built up.

    lr·(1 − dampening)/(1 − momentum) for SGD; lr/(√v̂ + ε) for each weight with Adam and its kin, RMSprop, Adagrad,
    Adadelta, with v̂ as each of them has it; the learning rate alone for an optimizer of another kind.
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
def add_prior_gradient(optimizer: Optimizer, delta: Mapping[Tensor, Tensor], strength: float) -> None:
    """∂/∂θ of ½ · strength · θᵀδθ, added to the gradients before the step: weight decay with a δ for each weight.

    SGD diverges where δ is large for its step size, so there δ counts no further than to where a step ends at zero.
    Optimizers that normalise their gradients need no such limit.
    """
    for group in optimizer.param_groups:
        for p in group["params"]:
            if p in delta and p.grad is not None:
                gradient, counted = local(p.grad), delta[p] * strength
                if isinstance(optimizer, SGD) and (step := effective_step(optimizer, group, p)):
                    counted.clamp_(max=1.0 / step)
                gradient.add_((counted * local(p)).to(gradient.dtype))


def unscale(optimizer: Optimizer, scaler: Any) -> None:
    """Give the gradients their true size before something is added to them; once, if that was not done yet."""
    state = scaler._per_optimizer_states[id(optimizer)]["stage"]
    if state.name == "READY":
        scaler.unscale_(optimizer)


def take_step(optimizer: Optimizer, scaler: Any = None) -> bool:
    """The optimizer's own step, through a gradient scaler if there is one. False where the scaler skipped it."""
    if scaler is None or not scaler.is_enabled():
        optimizer.step()
        return True
    scaler.step(optimizer)
    found = scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"]
    return not any(bool(value.item()) for value in found.values())
