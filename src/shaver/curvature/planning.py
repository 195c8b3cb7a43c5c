"""Making a plan: rules are proposed by module type, then checked against autograd on a few samples.

A rule is used only if its per-sample gradients equal autograd's. That check settles at once where the samples
stand in a layer's input (first, second, folded with other dimensions), whether a module's weight is also used
behind its back, and whether a subclass does something else; whatever does not pass is left to the generic rule.
"""

import itertools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shaver.batches import Forward, batch_size_of
from shaver.curvature.blocks import at_least_float32
from shaver.curvature.capture import FUNCTIONAL, Call, Copies, Functional, Spread, is_functional, recording, take
from shaver.curvature.generic import vmapped_gradients
from shaver.curvature.plan import LAYOUTS, Choice, Plan, arranged
from shaver.curvature.rules import linear, rules_for
from shaver.curvature.uses import Use, merge

#: Samples in the check. Two would do; three tell "two tokens" from "two samples".
SAMPLES = 3
_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-2}


def make_plan(model: nn.Module, forward: Forward | None, batch: Any, wanted: Mapping[str, Tensor]) -> Plan:
    """Choose a rule for every wanted parameter and check it on a few samples of ``batch``."""
    probe = _Probe(model, forward, batch, wanted)
    plan = Plan()
    for name in wanted:
        expected = probe.gradients(name)
        if expected is None:
            plan.idle.append(name)
            continue
        places = [(m, own) for m, names in probe.owners.items() for own, full in names.items() if full == name]
        called = [(m, own) for m, own in places if m in probe.passed]
        choices = probe.fitting_rules(called, expected) if called else None
        if choices is not None:
            for (module, own), choice in zip(called, choices, strict=True):
                plan.choices[module, own, name] = choice
            continue
        if len(called) == 1 and called[0][0] in probe.modules:
            module, own = called[0]
            found = probe.fitting_spread(module, own, expected)
            if found is not None:
                plan.choices[module, own, name], plan.spread[module] = found
                continue
        real = [(m, own) for m, own in places if not m.startswith(FUNCTIONAL)]
        if not called and len(real) == 1:
            copies = probe.fitting_copies(*real[0], expected)
            if copies is not None:
                plan.copies[name] = copies
                continue
        kinds = " + ".join(type(model.get_submodule(m)).__name__ for m, _ in real)
        tried = {label: reason for place in called for label, reason in probe.rejected.get(place, {}).items()}
        plan.generic[name] = "; ".join(
            [f"no rule for this use in {kinds}", *(f"{label} {reason}" for label, reason in tried.items())]
        )
        plan.vectorised &= probe.vmap_agrees(name, expected)
    _settle(plan)
    probe.describe(plan, wanted)
    return plan


class _Probe:
    """A forward and backward pass of a few samples, with autograd's per-sample gradients beside it.

    It runs at randomly perturbed weights (copies: the model is not touched), because at special weights, such as a
    zero-initialised head, every gradient below vanishes and a wrong rule would pass.
    """

    def __init__(self, model: nn.Module, forward: Forward | None, batch: Any, wanted: Mapping[str, Tensor]) -> None:
        self.model, self.function = model, Functional(model, forward)
        self.batch = take(batch, slice(0, SAMPLES))
        self.count = batch_size_of(self.batch)
        generator = torch.Generator().manual_seed(0)
        self.weights = {name: _perturbed(p, generator) for name, p in wanted.items()}
        self.owners = _owners(model, wanted)
        self.candidates = {n: list(rules_for(module)) for n, module in model.named_modules() if n in self.owners}
        self.modules = {name: model.get_submodule(name) for name, rules in self.candidates.items() if rules}
        matrices = {name: w for name, w in self.weights.items() if w.ndim == 2}
        # in place until the last gradient: activations that are computed again must find the same weights
        with self.function.placed(self.weights):
            with recording(self.modules, [], self.count, matrices) as calls:
                outputs = self.function(self.batch)
            self.calls = calls
            self._adopt_functional()
            check_outputs(outputs, self.count)
            self.outputs = outputs.detach()
            self._check_independent()
            self.direction = torch.randn(outputs.shape, generator=generator).to(outputs)
            scalars = (outputs * self.direction).reshape(self.count, -1).sum(1)
            leaves = list(self.weights.values())
            references = [torch.autograd.grad(s, leaves, retain_graph=True, allow_unused=True) for s in scalars]
            edges = [call.edge for call in self.calls]
            grads = torch.autograd.grad(outputs, edges, self.direction, allow_unused=True) if edges else ()
        self._references = [dict(zip(self.weights, row, strict=True)) for row in references]
        del references
        sizes = (float(_rms(r)) for row in self._references for r in row.values() if r is not None)
        self.floor = max(sizes, default=0.0)
        #: (module, parameter's own name) → rule → why it was not taken, for the message.
        self.rejected: dict[tuple[str, str], dict[str, str]] = {}
        #: Module name → its calls that a gradient reached, with that gradient.
        self.passed: dict[str, list[tuple[Call, Tensor]]] = {}
        for call, grad in zip(self.calls, grads, strict=True):
            if grad is not None:
                self.passed.setdefault(call.name, []).append((call, grad.unsqueeze(0)))

    def gradients(self, name: str) -> Tensor | None:
        """Autograd's gradients of one parameter, ``(samples, *shape)``; None where there is none."""
        rows = [row.pop(name) for row in self._references]  # asked for once: together they are several models
        if all(row is None for row in rows):
            return None
        return torch.stack([torch.zeros_like(self.weights[name].detach()) if row is None else row for row in rows])

    def fitting_rules(self, called: list[tuple[str, str]], expected: Tensor) -> list[Choice] | None:
        """The first combination of rules and layouts, one for each use, whose gradients are autograd's."""
        options = [
            [Choice(label, rule, layout) for layout in LAYOUTS for label, rule in self.candidates[module]]
            for module, _ in called
        ]
        for choices in itertools.islice(itertools.product(*options), 256):
            parts = [
                (choice, own, call, grad)
                for (module, own), choice in zip(called, choices, strict=True)
                for call, grad in self.passed[module]
            ]
            if self._agree_by(parts, expected):
                return list(choices)
        return None

    def fitting_copies(self, owner: str, own: str, expected: Tensor) -> Copies | None:
        """How to give a raw parameter one copy a sample so that each copy receives its sample's gradient."""
        for ones in (-1, 0) if expected.ndim > 2 else (0, 1, 2):
            copies = Copies(owner, self.model.get_submodule(owner), own, ones)
            if ones < 0 and expected.shape[1] != 1:
                continue
            try:
                with recording({}, [copies], self.count) as calls:
                    again = self.function.at(self.weights, self.batch)
                if len(calls) != 1 or not _close(again.detach(), self.outputs, 0.0):
                    continue
                (found,) = torch.autograd.grad(again, [calls[0].edge], self.direction, allow_unused=True)
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue  # the parameter is not used by broadcasting over samples
            if found is not None and self._agree(found.reshape(expected.shape), expected):
                return copies
        return None

    def fitting_spread(self, module: str, own: str, expected: Tensor) -> tuple[Choice, Spread] | None:
        """A rule for a module that is called without samples, and how to give its output one copy a sample."""
        shapes = {call.inputs.shape for call, _ in self.passed[module]}
        for ones in (0, 1):
            how = Spread(len(next(iter(shapes))), ones)
            if len(shapes) > 1 or not how.fits(self.passed[module][0][0].inputs):
                continue
            try:
                with recording({module: self.modules[module]}, [], self.count, spread={module: how}) as calls:
                    again = self.function.at(self.weights, self.batch)
                if not _close(again.detach(), self.outputs, 0.0):
                    continue
                edges = [call.edge for call in calls]
                grads = torch.autograd.grad(again, edges, self.direction, allow_unused=True)
            except (RuntimeError, ValueError, IndexError, TypeError):
                continue  # what follows does not broadcast over samples
            arrived = [(call, grad.unsqueeze(0)) for call, grad in zip(calls, grads, strict=True) if grad is not None]
            for label, rule in self.candidates[module]:
                choice = Choice(label, rule, "first")
                if self._agree_by([(choice, own, call, grad) for call, grad in arrived], expected):
                    return choice, how
        return None

    def _agree_by(self, parts: list[tuple[Choice, str, Call, Tensor]], expected: Tensor) -> bool:
        """Whether the sum of some uses, each by its rule, is autograd's gradient."""
        uses: list[Use] = []
        try:
            for choice, own, call, grad in parts:
                arguments = arranged(call, grad, choice.layout, self.count)
                self._reject((call.name, own), choice, "differs from autograd")
                uses.append(choice.rule(call.module, *arguments)[own])
            use = merge(uses)
            missed = size = 0.0
            for n in range(self.count):  # a vocabulary's gradients are built for one sample at a time
                found, row = use.per_sample(n, n + 1)[0], expected[n : n + 1]
                if found.shape != row.shape:
                    return False
                missed += float(_squares(found - row.to(found.dtype)))
                size += float(_squares(row))
        except (RuntimeError, ValueError, IndexError, KeyError, StopIteration, AttributeError, TypeError) as error:
            if len(uses) < len(parts):
                choice, own, call, _ = parts[len(uses)]
                self._reject((call.name, own), choice, f"raised {type(error).__name__}: {error}")
            return False  # the shapes do not fit this layout or rule
        rms = (size / expected.numel()) ** 0.5
        allowed = _TOLERANCE.get(expected.dtype, 0.2) * (rms + 1e-4 * self.floor)
        return bool((missed / expected.numel()) ** 0.5 <= allowed)

    def _reject(self, place: tuple[str, str], choice: Choice, reason: str) -> None:
        """Keep why a rule was not taken, in the layout that most rules are written for."""
        if choice.layout == "first":
            self.rejected.setdefault(place, {})[choice.label] = reason.splitlines()[0]

    def vmap_agrees(self, name: str, expected: Tensor) -> bool:
        """Whether the generic rule's vmap gives the per-sample gradients, for one output gradient and for two."""
        detached = {name: self.weights[name].detach()}
        try:
            for columns in (1, 2):
                cotangents = self.direction.expand(columns, *self.direction.shape)
                found = vmapped_gradients(self.function, detached, self.batch, cotangents)[name]
                if not all(self._agree(row, expected) for row in found):
                    return False
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            return False  # data-dependent control flow, or an operator without a batching rule
        return True

    def describe(self, plan: Plan, wanted: Mapping[str, Tensor]) -> None:
        """Complete a plan whose choices are made: what to watch, and how large a sample is."""
        for call in self.calls:
            plan.rows.setdefault(call.name, set()).add(call.inputs.shape[0] // self.count)
        used = {module for module, _, _ in plan.choices}
        plan.linears = {name: p for name, p in wanted.items() if FUNCTIONAL + name in used}
        plan.modules = {name: module for name, module in self.modules.items() if name in used}
        kept = [call for call in self.calls if call.name in used]
        copied = sum(self.weights[name].numel() for name in plan.copies)
        spread = sum(call.shape.numel() for call in kept if call.name in plan.spread)  # without samples in the check
        plan.outputs = (sum(call.shape.numel() for call in kept) - spread) // self.count + spread + copied
        plan.patches = max((_unfolded(call) for call in kept), default=0) // self.count

    def _agree(self, found: Tensor, expected: Tensor) -> bool:
        return _close(found, expected, self.floor)

    def _adopt_functional(self) -> None:
        """Make owners of the recorded ``F.linear`` calls, with the linear rule as candidate."""
        names = {id(w): name for name, w in self.weights.items()}
        for call in self.calls:
            if is_functional(call):
                stand_in: Any = call.module
                own = {"weight": call.name.removeprefix(FUNCTIONAL)}
                if id(stand_in.bias) in names:
                    own["bias"] = names[id(stand_in.bias)]
                self.owners[call.name] = own
                self.candidates[call.name] = [("linear", linear)]

    def _check_independent(self) -> None:
        """A sample's output must not depend on the other samples: per-sample gradients would not exist."""
        if self.count < 2:
            return
        suspects = [
            name
            for name, module in self.model.named_modules()
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
                alone = self.function(take(self.batch, slice(0, 1)))
        except ValueError as error:  # what BatchNorm says to a batch of one
            if suspects:
                raise ValueError(message) from error
            raise
        if alone.shape[1:] != self.outputs.shape[1:]:
            return
        distance, scale = (alone[0] - self.outputs[0]).abs().max(), self.outputs.abs().max()
        finite = torch.isfinite(alone).all() and torch.isfinite(self.outputs).all()
        # a NaN is named where the batch is processed
        if bool(finite) and bool(distance > _TOLERANCE.get(alone.dtype, 0.2) * scale):
            raise ValueError(message)


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


def _close(found: Tensor, expected: Tensor, floor: float) -> bool:
    """Equal up to rounding; ``floor``, the size of other gradients, stands for one that is zero but for rounding."""
    if found.shape != expected.shape:
        return False
    tolerance = _TOLERANCE.get(expected.dtype, 0.2)
    return bool(_rms(found - expected.to(found.dtype)) <= tolerance * (_rms(expected) + 1e-4 * floor))


def _squares(values: Tensor) -> Tensor:
    return at_least_float32(values).square().sum(dtype=torch.float64)


def _rms(values: Tensor) -> Tensor:
    return at_least_float32(values).square().mean().sqrt()


def _settle(plan: Plan) -> None:
    """Give all parameters of a module the same layout: a bias alone fits several, the weight beside it decides."""
    chosen: dict[str, Choice] = {}
    for (module, own, _), choice in plan.choices.items():
        if module not in chosen or own == "weight":
            chosen[module] = choice
    for key in plan.choices:
        plan.choices[key] = chosen[key[0]]


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
    outs = call.shape.numel() // weight.shape[0]  # type: ignore[union-attr, operator, index]
    per_position = weight[0].numel() * getattr(call.module, "groups", 1)  # type: ignore[union-attr, operator, index]
    return int(outs * per_position)
