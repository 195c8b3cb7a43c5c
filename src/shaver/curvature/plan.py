"""Which rule serves which parameter: proposed by module type, then checked against autograd on a few samples.

A rule is used only if its per-sample gradients equal autograd's. That check settles at once where the samples
stand in a layer's input (first, second, folded with other dimensions), whether a module's weight is also used
behind its back, and whether a subclass does something else; whatever does not pass is left to the generic rule.
"""

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from shaver.batches import Forward, batch_size_of
from shaver.curvature.capture import FUNCTIONAL, Call, Copies, Functional, recording, take
from shaver.curvature.generic import vmapped_gradients
from shaver.curvature.rules import Rule, linear, rules_for
from shaver.curvature.uses import Dense, Use, merge

#: Samples in the check. Two would do; three tell "two tokens" from "two samples".
PROBE = 3
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}


@dataclass(frozen=True)
class Choice:
    """A rule for a module, and where the samples stand in its input.

    Attributes:
        label: The rule's name.
        rule: The rule.
        layout: One of ``_LAYOUTS``.
    """

    label: str
    rule: Rule
    layout: str


@dataclass
class Plan:
    """The outcome: how each wanted parameter is computed.

    Attributes:
        choices: (module name, parameter's own name in it, parameter name in the model) → choice.
        copies: Raw parameters that are given one copy a sample: parameter name → how.
        linears: Weights that are used by ``F.linear`` outside a layer of their own.
        generic: Parameters left to the generic rule, with the reason.
        idle: Parameters no gradient reached in the check; looked at again in every batch.
        rows: Module name → rows a sample that a folded layout had in the check. Another number might mean that the
            rows are chosen by the data, so it is not trusted.
        vectorised: Whether the generic rule may use vmap: operators exist whose batching rule is wrong.
        modules: Module name → module, for those with a choice.
        outputs: Numbers a sample in the recorded outputs: what K backward passes have to keep.
        patches: The largest number of inputs a sample any layer unfolds to.
    """

    choices: dict[tuple[str, str, str], Choice] = field(default_factory=dict)
    copies: dict[str, Copies] = field(default_factory=dict)
    linears: dict[str, Tensor] = field(default_factory=dict)
    generic: dict[str, str] = field(default_factory=dict)
    idle: list[str] = field(default_factory=list)
    rows: dict[str, set[int]] = field(default_factory=dict)
    vectorised: bool = True
    modules: dict[str, nn.Module] = field(default_factory=dict)
    outputs: int = 0
    patches: int = 0

    def uses(self, calls: list[Call], grads: list[Tensor | None], batch: int) -> Iterator[tuple[str, Use]]:
        """Every planned parameter with its merged use, one parameter at a time.

        Args:
            calls: What :func:`recording` recorded.
            grads: For each call the output gradients ``(K, *output.shape)``, or None.
            batch: The number of samples.
        """
        found: dict[str, list[Use]] = {}
        doubted = self.doubted(calls, batch)
        raw = {(copies.name, copies.own): name for name, copies in self.copies.items()}
        for call, grad in zip(calls, grads, strict=True):
            if grad is None:
                continue
            if call.parameter is not None:
                use = Dense(_wide(grad).reshape(len(grad), batch, *call.inputs.shape))
                found.setdefault(raw[call.name, call.parameter], []).append(use)
                continue
            keys = [key for key in self.choices if key[0] == call.name]
            if all(name in doubted for _, _, name in keys):
                continue
            choice = self.choices[keys[0]]
            uses = choice.rule(call.module, *_arranged(call, grad, choice.layout, batch))
            for _, own, name in keys:
                if name not in doubted:
                    found.setdefault(name, []).append(uses[own])
        for name, parts in found.items():
            yield name, merge(parts)

    def doubted(self, calls: list[Call], batch: int) -> set[str]:
        """Parameters whose layer was called with other rows than in the check: left to the generic rule this time.

        A layer that serves only some samples or positions, chosen by the data, looks like that.
        """
        layouts = {module: choice.layout for (module, _, _), choice in self.choices.items()}
        wrong = set()
        for call in calls:
            if call.parameter is not None or call.name not in layouts:
                continue
            layout, shape = layouts[call.name], call.inputs.shape
            if layout == "first":
                fits = shape[0] == batch
            elif layout == "second":
                fits = len(shape) > 1 and shape[1] == batch
            else:
                fits = shape[0] % batch == 0 and shape[0] // batch in self.rows[call.name]
            if not fits:
                wrong.add(call.name)
        return {name for module, _, name in self.choices if module in wrong} if wrong else wrong

    def single_uses(self, calls: list[Call]) -> set[tuple[str, str | None]]:
        """(module, raw parameter or None) of the calls whose parameters occur in no other of these calls."""
        users: dict[str, list[tuple[str, str | None]]] = {}
        for call in calls:
            names = [key[2] for key in self.choices if key[0] == call.name] if call.parameter is None else []
            names += [n for n, c in self.copies.items() if (c.name, c.own) == (call.name, call.parameter)]
            for name in names:
                users.setdefault(name, []).append((call.name, call.parameter))
        shared = {user for several in users.values() if len(several) > 1 for user in several}
        return {(call.name, call.parameter) for call in calls} - shared

    def labels(self) -> dict[str, str]:
        """Parameter → rule, in words."""
        words: dict[str, list[str]] = {}
        for (_, _, name), choice in self.choices.items():
            place = "" if choice.layout == "first" else f" ({choice.layout})"
            words.setdefault(name, []).append(choice.label + place)
        labels = {name: " + ".join(parts) for name, parts in words.items()}
        labels |= dict.fromkeys(self.copies, "one copy a sample")
        labels |= {name: f"generic: {reason}" for name, reason in self.generic.items()}
        return labels | dict.fromkeys(self.idle, "no gradient reaches it")


def make_plan(model: nn.Module, forward: Forward | None, batch: Any, wanted: Mapping[str, Tensor]) -> Plan:
    """Choose a rule for every wanted parameter and check it on a few samples of ``batch``.

    The check runs at randomly perturbed weights (a copy: the model is not touched), because at special weights,
    such as a zero-initialised head, every gradient below vanishes and a wrong rule would pass.
    """
    plan = Plan()
    probe = take(batch, slice(0, PROBE))
    count = batch_size_of(probe)
    function = Functional(model, forward)
    generator = torch.Generator().manual_seed(0)
    weights = {name: _perturbed(p, generator) for name, p in wanted.items()}

    owners = _owners(model, wanted)
    candidates = {name: list(rules_for(module)) for name, module in model.named_modules() if name in owners}
    modules = {name: model.get_submodule(name) for name, rules in candidates.items() if rules}
    matrices = {name: w for name, w in weights.items() if w.ndim == 2}
    with recording(modules, linears=matrices) as calls:
        outputs = function.at(weights, probe)
    within = _inside_layers(calls)
    calls = [call for place, call in enumerate(calls) if place not in within]
    _adopt(calls, weights, owners, candidates)
    check_outputs(outputs, count)
    _check_independent(function, weights, probe, outputs, model)
    direction = torch.randn(outputs.shape, generator=generator).to(outputs)
    scalars = (outputs * direction).flatten(1).sum(1) if outputs.ndim > 1 else outputs * direction
    leaves = list(weights.values())
    references = [torch.autograd.grad(s, leaves, retain_graph=True, allow_unused=True) for s in scalars]
    edges = [call.edge for call in calls]
    grads = torch.autograd.grad(outputs, edges, direction, allow_unused=True) if edges else ()

    by_module: dict[str, list[tuple[Call, Tensor]]] = {}
    for call, grad in zip(calls, grads, strict=True):
        if grad is not None:
            by_module.setdefault(call.name, []).append((call, grad.unsqueeze(0)))

    floor = max((float(_rms(r)) for row in references for r in row if r is not None), default=0.0)
    for position, name in enumerate(wanted):
        reference = [r[position] for r in references]
        if all(r is None for r in reference):
            plan.idle.append(name)
            continue
        expected = torch.stack([torch.zeros_like(leaves[position]) if r is None else r for r in reference])
        places = [(m, own) for m, names in owners.items() for own, full in names.items() if full == name]
        called = [(m, own) for m, own in places if m in by_module]
        fits = _fitting(called, candidates, by_module, expected, floor, count) if called else None
        if fits is not None:
            for (module, own), choice in zip(called, fits, strict=True):
                plan.choices[module, own, name] = choice
            continue
        real = [(m, own) for m, own in places if not m.startswith(FUNCTIONAL)]
        if not called and len(real) == 1:
            (owner, own) = real[0]
            for ones in (-1, 0) if weights[name].ndim > 1 else (0, 1, 2):
                copies = Copies(owner, model.get_submodule(owner), own, ones)
                if _broadcasts(copies, function, weights, probe, outputs.detach(), direction, expected, floor):
                    plan.copies[name] = copies
                    break
        if name not in plan.copies:
            kinds = " + ".join(type(model.get_submodule(m)).__name__ for m, _ in real)
            plan.generic[name] = f"no rule for this use in {kinds}"
            plan.vectorised &= _vmap_agrees(function, {name: weights[name]}, probe, direction, expected, floor)
    _settle(plan)
    for call in calls:
        plan.rows.setdefault(call.name, set()).add(call.inputs.shape[0] // count)
    used = {module for module, _, _ in plan.choices}
    plan.linears = {name: wanted[name] for name in matrices if FUNCTIONAL + name in used}
    plan.modules = {name: module for name, module in modules.items() if name in used}
    kept = [call for call in calls if call.name in used]
    copied = sum(weights[name].numel() for name in plan.copies)
    plan.outputs = sum(call.numel for call in kept) // count + copied
    plan.patches = max((_unfolded(call) for call in kept), default=0) // count
    return plan


def _inside_layers(calls: list[Call]) -> set[int]:
    """Places of the ``F.linear`` calls that a recorded layer made itself: the layer's own record follows at once."""
    return {
        place
        for place, (call, after) in enumerate(itertools.pairwise(calls))
        if call.name.startswith(FUNCTIONAL)
        and not after.name.startswith(FUNCTIONAL)
        and call.edge.node is after.edge.node
    }


def _adopt(
    calls: list[Call],
    weights: Mapping[str, Tensor],
    owners: dict[str, dict[str, str]],
    candidates: dict[str, list[tuple[str, Rule]]],
) -> None:
    """Make owners of the remaining ``F.linear`` calls, with the linear rule as candidate."""
    names = {id(w): name for name, w in weights.items()}
    for call in calls:
        if call.name.startswith(FUNCTIONAL):
            stand_in: Any = call.module
            own = {"weight": call.name.removeprefix(FUNCTIONAL)}
            if id(stand_in.bias) in names:
                own["bias"] = names[id(stand_in.bias)]
            owners[call.name] = own
            candidates[call.name] = [("linear", linear)]


def _settle(plan: Plan) -> None:
    """Give all parameters of a module the same layout: a bias alone fits several, the weight beside it decides."""
    chosen: dict[str, Choice] = {}
    for (module, own, _), choice in plan.choices.items():
        if module not in chosen or own == "weight":
            chosen[module] = choice
    for key in plan.choices:
        plan.choices[key] = chosen[key[0]]


def _fitting(
    called: list[tuple[str, str]],
    candidates: Mapping[str, list[tuple[str, Rule]]],
    by_module: Mapping[str, list[tuple[Call, Tensor]]],
    expected: Tensor,
    floor: float,
    count: int,
) -> list[Choice] | None:
    """The first combination of rules and layouts whose per-sample gradients are autograd's."""
    options = [
        [Choice(label, rule, layout) for layout in _LAYOUTS for label, rule in candidates[module]]
        for module, _ in called
    ]
    for choices in itertools.islice(itertools.product(*options), 256):
        parts: list[Use] = []
        try:
            for (module, own), choice in zip(called, choices, strict=True):
                for call, grad in by_module[module]:
                    arranged = _arranged(call, grad, choice.layout, count)
                    parts.append(choice.rule(call.module, *arranged)[own])
            found = merge(parts).per_sample(0, count)[0]
        except (RuntimeError, ValueError, IndexError, KeyError, StopIteration, AttributeError, TypeError):
            continue  # the shapes do not fit this layout or rule
        if _agree(found, expected, floor):
            return list(choices)
    return None


def _broadcasts(
    copies: Copies,
    function: Functional,
    weights: Mapping[str, Tensor],
    probe: Any,
    outputs: Tensor,
    direction: Tensor,
    expected: Tensor,
    floor: float,
) -> bool:
    """Whether one copy a sample leaves the outputs as they are and receives the per-sample gradients."""
    count = len(outputs)
    if copies.ones < 0 and (expected.ndim < 2 or expected.shape[1] != 1):
        return False
    try:
        with recording({}, [copies], count) as calls:
            again = function.at(weights, probe)
        if len(calls) != 1 or not _agree(again.detach(), outputs, 0.0):
            return False
        (found,) = torch.autograd.grad(again, [calls[0].edge], direction, allow_unused=True)
    except (RuntimeError, ValueError, IndexError, TypeError):
        return False  # the parameter is not used by broadcasting over samples
    return found is not None and _agree(found.reshape(expected.shape), expected, floor)


def _vmap_agrees(
    function: Functional, weights: dict[str, Tensor], probe: Any, direction: Tensor, expected: Tensor, floor: float
) -> bool:
    """Whether the generic rule's vmap gives the per-sample gradients, for one output gradient and for two."""
    (name,) = weights
    detached = {name: weights[name].detach()}
    try:
        for columns in (1, 2):
            cotangents = direction.expand(columns, *direction.shape)
            found = vmapped_gradients(function, detached, probe, cotangents)[name]
            if not all(_agree(row, expected, floor) for row in found):
                return False
    except (RuntimeError, ValueError, TypeError, NotImplementedError):
        return False  # data-dependent control flow, or an operator without a batching rule
    return True


def _agree(found: Tensor, expected: Tensor, floor: float) -> bool:
    """Equal up to rounding; ``floor``, the size of other gradients, stands for one that is zero but for rounding."""
    if found.shape != expected.shape:
        return False
    tolerance = _TOLERANCE.get(expected.dtype, 0.2)
    wide = expected.to(found.dtype)
    return bool(_rms(found - wide) <= tolerance * (_rms(wide) + 1e-4 * floor))


def _rms(values: Tensor) -> Tensor:
    return _wide(values).square().mean().sqrt()


_LAYOUTS = ("first", "second", "folded", "folded last")


def _arranged(call: Call, grad: Tensor, layout: str, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients with the samples first, in at least single precision."""
    inputs, grads = call.inputs, grad
    if layout == "first":
        if inputs.shape[0] != count or grads.shape[1] != count:
            raise ValueError("the samples do not come first")
    elif layout == "second":
        inputs, grads = inputs.transpose(0, 1), grads.transpose(1, 2)
        if inputs.shape[0] != count or grads.shape[1] != count:
            raise ValueError("the samples do not come second")
    elif inputs.shape[0] % count:
        raise ValueError("the samples are not folded into the first dimension")
    elif layout == "folded":
        inputs = inputs.reshape(count, -1, *inputs.shape[1:])
        grads = grads.reshape(len(grads), count, -1, *grads.shape[2:])
    else:
        inputs = inputs.reshape(-1, count, *inputs.shape[1:]).transpose(0, 1)
        grads = grads.reshape(len(grads), -1, count, *grads.shape[2:]).transpose(1, 2)
    return _wide(inputs), _wide(grads)


def _wide(values: Tensor) -> Tensor:
    return values.float() if values.dtype in (torch.float16, torch.bfloat16) else values


def _owners(model: nn.Module, wanted: Mapping[str, Tensor]) -> dict[str, dict[str, str]]:
    """Module name → {own parameter name: the wanted name}; a tied parameter has several owners."""
    names = {id(p): name for name, p in wanted.items()}
    owners: dict[str, dict[str, str]] = {}
    for module_name, module in model.named_modules():
        own = {n: names[id(p)] for n, p in module._parameters.items() if p is not None and id(p) in names}
        if own:
            owners[module_name] = own
    return owners


def _perturbed(parameter: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(parameter.shape, generator=generator).to(parameter)
    scale = 0.1 * parameter.detach().square().mean().sqrt() + 0.02
    return (parameter.detach() + scale * noise).requires_grad_()


def _unfolded(call: Call) -> int:
    """How many numbers a layer's inputs become: a convolution's patches, else the inputs."""
    kernel = getattr(call.module, "kernel_size", None)
    if kernel is None or not isinstance(kernel, tuple):
        return call.inputs.numel()
    weight = call.module.weight
    outs = call.numel // weight.shape[0]  # type: ignore[union-attr, operator, index]
    per_position = weight[0].numel() * getattr(call.module, "groups", 1)  # type: ignore[union-attr, operator, index]
    return int(outs * per_position)


def check_outputs(outputs: Tensor, count: int) -> None:
    """Outputs have a gradient and one row a sample."""
    if not outputs.requires_grad:
        raise ValueError(
            "the model's outputs have no gradient: it detaches them, runs under no_grad, or its trainable "
            "parameters do not reach the outputs."
        )
    if outputs.ndim == 0 or outputs.shape[0] != count:
        raise ValueError(
            f"the model returned outputs of shape {tuple(outputs.shape)} for {count} samples; the first dimension "
            "must be the samples. Pass forward=lambda model, batch: … that puts them first."
        )


def _check_independent(
    function: Functional, weights: Mapping[str, Tensor], probe: Any, outputs: Tensor, model: nn.Module
) -> None:
    """A sample's output must not depend on the other samples: per-sample gradients would not exist."""
    if len(outputs) < 2:
        return
    suspects = [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._BatchNorm) and module.running_mean is None
    ]
    hint = f" Suspect: {', '.join(suspects)} (track_running_stats=False)." if suspects else ""
    message = (
        "the output of a sample changes with the other samples in its batch, so per-sample gradients do not "
        "exist. A batch-dependent layer (BatchNorm without running statistics) or randomness in evaluation "
        f"mode does that.{hint}"
    )
    try:
        with torch.no_grad():
            alone = function.at(weights, take(probe, slice(0, 1)))
    except ValueError as error:  # what BatchNorm says to a batch of one
        if suspects:
            raise ValueError(message) from error
        raise
    scale = outputs.detach().abs().max()
    tolerance = _TOLERANCE.get(outputs.dtype, 0.2)
    if alone.shape[1:] == outputs.shape[1:] and not bool((alone[0] - outputs[0]).abs().max() <= tolerance * scale):
        if not bool(torch.isfinite(alone).all() and torch.isfinite(outputs).all()):
            return  # a NaN is named where the batch is processed
        raise ValueError(message)
