"""The optimizer by name, function or object, and its learning rate over time."""

import math
from collections.abc import Callable, Iterable

import torch
from torch import nn
from torch.optim import Optimizer

from shaver.naming import check_name

#: An optimizer by name, by a function of the parameters, or the object itself.
OptimizerLike = str | Callable[[Iterable[nn.Parameter]], Optimizer] | Optimizer
#: The learning rate's factor as a function of the share of training done, 0 to 1; or its name.
ScheduleLike = str | Callable[[float], float]

#: Default learning rates.
DEFAULT_LR = {"sgd": 0.05, "adam": 1e-3, "adamw": 1e-3}
#: Learning rate at the end of the cosine.
LAST_LR = 1e-6
SCHEDULES = ("cosine", "constant")


def build_optimizer(
    optimizer: OptimizerLike, model: nn.Module, lr: float | None, weight_decay: float | None
) -> Optimizer:
    """An optimizer over the model's trainable parameters.

    ``"sgd"`` has momentum 0.9. ``weight_decay`` is L2 for SGD and Adam and decoupled for AdamW; ``None`` is zero. A
    function or an object has its own learning rate and weight decay, and must hold parameters of this model.
    """
    parameters = [p for p in model.parameters() if p.requires_grad]
    if not parameters:
        raise ValueError("the model has no trainable parameters (requires_grad is False or there are none).")
    if isinstance(optimizer, str):
        name = check_name("optimizer", optimizer, DEFAULT_LR)
        rate = DEFAULT_LR[name] if lr is None else lr
        decay = weight_decay or 0.0
        if name == "sgd":
            return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=decay)
        kind = torch.optim.Adam if name == "adam" else torch.optim.AdamW
        return kind(parameters, lr=rate, weight_decay=decay)
    for option, value in {"lr": lr, "weight_decay": weight_decay}.items():
        if value is not None:
            raise ValueError(f"{option}={value!r} has no effect on the given optimizer; set it there and leave it out.")
    built = optimizer if isinstance(optimizer, Optimizer) else optimizer(parameters)
    if not isinstance(built, Optimizer):
        raise TypeError(f"the optimizer function must return a torch.optim.Optimizer, not {built!r}.")
    known = {id(p) for group in built.param_groups for p in group["params"]}
    if not any(id(p) in known for p in parameters):
        raise ValueError(
            f"the given {type(built).__name__} holds none of the model's trainable parameters; "
            "was the model copied or moved after the optimizer was made?"
        )
    return built


def scheduled_lr(schedule: ScheduleLike, base: float, progress: float) -> float:
    """The learning rate after the share ``progress`` of training. The cosine runs from ``base`` to 1e-6."""
    if callable(schedule):
        return base * schedule(progress)
    if schedule == "constant":
        return base
    last = min(LAST_LR, base)
    return last + (base - last) * 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
