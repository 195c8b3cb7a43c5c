"""Plans for whole and for sharded parameters (FSDP2), and checks of what sharded parameters do not support."""

from dataclasses import replace
from typing import Any

from torch import nn

from shaver.batches import Forward
from shaver.curvature.capture import undisturbed
from shaver.curvature.plan import Plan
from shaver.curvature.rule_choice import make_plan
from shaver.ranks import HeldParameters
from shaver.shards import whole_copy


def plan_for(held: HeldParameters, model: nn.Module, forward: Forward, batch: Any) -> Plan:
    """Choose the rules. Sharded parameters have values only while the model runs, so a whole copy is used for them."""
    if not held.is_sharded:
        with undisturbed(model):
            return make_plan(model, forward, batch, held.parameters)
    copy = whole_copy(model)
    with undisturbed(copy):
        plan = make_plan(copy, forward, batch, {name: p for name, p in copy.named_parameters() if p.requires_grad})
    check_generic(held, [*plan.generic, *plan.recording.linears])
    if plan.routed:
        raise NotImplementedError(
            "the data decide which rows a layer receives (a mixture of experts, an index by a tensor), which sharded "
            "parameters do not support; train with DistributedDataParallel."
        )
    modules = {name: model.get_submodule(name) for name in plan.recording.modules}
    copies = [replace(raw, module=model.get_submodule(raw.name)) for raw in plan.recording.copies]
    plan.recording = replace(plan.recording, modules=modules, copies=copies)
    return plan


def check_generic(held: HeldParameters, names: list[str]) -> None:
    """Refuse the generic rule for sharded parameters, because it needs whole ones."""
    if names and held.is_sharded:
        raise NotImplementedError(
            f"{names[0]!r} is used outside a layer that has a rule, or its layer received different rows in the first "
            "step; sharded parameters support neither. Train with DistributedDataParallel, or set requires_grad to "
            "False for it."
        )
