"""What is different where each process holds a part of every parameter (FSDP2)."""

import math
from dataclasses import replace
from typing import Any

from torch import nn

from shaver.batches import Forward
from shaver.curvature.capture import undisturbed
from shaver.curvature.plan import Plan
from shaver.curvature.planning import make_plan
from shaver.ranks import Ranks
from shaver.shards import whole_copy


def plan_by_copy(model: nn.Module, forward: Forward, batch: Any) -> Plan:
    """A sharded model has its weights only while it runs: the plan is made with a copy that has them all.

    Raises:
        NotImplementedError: A parameter is used outside a layer that has a rule.
    """
    copy = whole_copy(model)
    wanted = {name: p for name, p in copy.named_parameters() if p.requires_grad}
    with undisturbed(copy):
        plan = make_plan(copy, forward, batch, wanted)
    if alone := [*plan.generic, *plan.linears]:
        raise NotImplementedError(
            f"{alone[0]!r} is used outside a layer that has a rule, and sharded parameters need one; train with "
            "DistributedDataParallel, or set requires_grad to False for it."
        )
    plan.modules = {name: model.get_submodule(name) for name in plan.modules}
    plan.copies = {n: replace(c, module=model.get_submodule(c.name)) for n, c in plan.copies.items()}
    return plan


def check_same_unit(ranks: Ranks, unit: float, loss: str, count: int) -> None:
    """Squares of several ranks are summed before they are scaled, so that one unit has to be right for all.

    Raises:
        ValueError: The ranks have different numbers of samples, and the loss is a mean over each one's own.
    """
    (total,) = ranks.total(unit)
    if not math.isclose(total, unit * ranks.size, rel_tol=1e-9):
        raise ValueError(
            f'with sharded parameters loss="{loss}" needs as many samples on every rank ({count} here); use '
            'loss="auto".'
        )
