"""The choice of a rule for each parameter: ordered strategies, each checked against autograd on a few samples.

A strategy is a method ``try_fit(name, reference)`` that returns a :class:`RuleChoice` or None. A choice is used only if
its per-sample gradients equal autograd's. This one check answers three questions: which dimension of a layer's input
holds the samples (first, second, or folded with others), whether a module's weight is also used outside the module,
and whether a subclass computes something else. A parameter that no strategy fits gets the generic rule.
"""

import itertools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

from shaver.batches import Forward
from shaver.curvature.capture import FUNCTIONAL, Call, Copies, Recording, SharedInput, undisturbed
from shaver.curvature.kernels import kernel_shape
from shaver.curvature.plan import LAYOUTS, Plan, PlannedLayer, arranged
from shaver.curvature.probe import Reference, RuleProbe
from shaver.curvature.rules import Candidate, candidates_for, linear
from shaver.curvature.uses import Dense, Use, merge
from shaver.ranks import HeldParameters
from shaver.shards import whole_copy

#: Largest number of combinations of rules and layouts that are tried for a parameter with several uses.
_COMBINATIONS = 256


@dataclass(frozen=True)
class Part:
    """One layer that uses a parameter, with its rule and layout."""

    layer: str  # the layer's name in the model
    own: str  # the parameter's own name in the layer
    candidate: Candidate
    layout: str  # one of shaver.curvature.plan.LAYOUTS


@dataclass(frozen=True)
class RuleChoice:
    """How one parameter's per-sample gradients are computed.

    Attributes:
        parts: The layers that use it, with their rules.
        tells: Whether the gradients of at least two samples were compared, which a layout needs.
        spread: How its only layer, which is called without samples, gets one copy per sample.
        copies: How the parameter itself gets one copy per sample.
    """

    tells: bool
    parts: tuple[Part, ...] = ()
    spread: SharedInput | None = None
    copies: Copies | None = None


def make_plan(model: nn.Module, forward: Forward | None, batch: Any, wanted: Mapping[str, Tensor]) -> Plan:
    """Choose a rule for every wanted parameter and check it on a few samples of ``batch``."""
    return _Chooser(model, forward, batch, wanted).plan_of(wanted)


def plan_for(held: HeldParameters, model: nn.Module, forward: Forward, batch: Any) -> Plan:
    """Choose the rules. Sharded parameters (FSDP2) have values only while the model runs, so a whole copy stands in."""
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


class _Chooser:
    """The strategies, in the order in which they are tried, and the plan that grows from them."""

    def __init__(self, model: nn.Module, forward: Forward | None, batch: Any, wanted: Mapping[str, Tensor]) -> None:
        self.model = model
        self.owners = _owners(model, wanted)
        self.candidates = {name: list(candidates_for(model.get_submodule(name))) for name in self.owners}
        self.modules = {name: model.get_submodule(name) for name, found in self.candidates.items() if found}
        self.probe = probe = RuleProbe(model, forward, batch, wanted, self.modules)
        self._adopt_functional()
        self.plan = Plan(samples=probe.samples, routed=probe.routed, alters_inputs=probe.alters_inputs)
        self.spread: dict[str, SharedInput] = {}
        self._deciding: dict[str, tuple[bool, bool]] = {}  # layer → how well its layout is known
        self.choices: dict[str, RuleChoice] = {}
        self.left: dict[str, Reference] = {}  # parameters without a rule of the layers, with their gradients
        self.rejected: dict[str, dict[str, str]] = {}  # parameter → rule → why it does not fit
        self._drop_wrong_guesses()
        probe.visit(self.choose)
        self.choose_others()

    def choose(self, name: str, reference: Reference) -> None:
        """Choose a rule of the layers for one parameter, or keep its gradient for the other strategies."""
        self.rejected[name] = {}
        choice = self.layer_rules(name, reference)
        if choice is None:
            self.left[name] = reference
        else:
            self.choices[name] = choice

    def choose_others(self) -> None:
        """The strategies that pass the samples through the model again, for the parameters that are left."""
        for name, reference in self.left.items():
            for try_fit in (self.layer_without_samples, self.copied_parameter):
                choice = try_fit(name, reference)
                if choice is not None:
                    self.choices[name] = choice
                    break
            else:
                kinds = " + ".join(type(self.model.get_submodule(m)).__name__ for m, _ in self._places(name, real=True))
                tried = (f"{label} {reason}" for label, reason in self.rejected[name].items())
                self.plan.generic[name] = "; ".join([f"no rule for this use in {kinds}", *tried])

    # The strategies ----------------------------------------------------------------------------------------------

    def layer_rules(self, name: str, reference: Reference) -> RuleChoice | None:
        """The first combination of rules and layouts that fits, with one rule and layout per layer."""
        called = [(layer, own) for layer, own in self._places(name) if layer in self.probe.passed]
        if not called:
            return None
        options = [
            [Part(layer, own, candidate, layout) for layout in LAYOUTS for candidate in self.candidates[layer]]
            for layer, own in called
        ]
        for parts in itertools.islice(itertools.product(*options), _COMBINATIONS):
            uses = [(part, call, grad) for part in parts for call, grad in self.probe.passed[part.layer]]
            if (tells := self._agreement(name, uses, reference)) is not None:
                return RuleChoice(tells, parts)
        return None

    def layer_without_samples(self, name: str, reference: Reference) -> RuleChoice | None:
        """A rule for a layer that is called without samples, and whose output can have one copy per sample."""
        called = [(layer, own) for layer, own in self._places(name) if layer in self.probe.passed]
        if len(called) != 1 or called[0][0] not in self.modules:
            return None
        ((layer, own),) = called
        inputs = [call.inputs for call, _ in self.probe.passed[layer]]
        for ones in (-1, 0):
            spread = SharedInput(inputs[0].ndim, ones)
            if len({x.shape for x in inputs}) > 1 or not spread.fits(inputs[0]):
                continue
            passed = self._attempt(Recording({layer: self.modules[layer]}, spread={layer: spread}))
            for candidate in self.candidates[layer]:
                part = Part(layer, own, candidate, "first")
                uses = [(part, call, grad) for call, grad in passed]
                if uses and (tells := self._agreement(name, uses, reference)) is not None:
                    return RuleChoice(tells, (part,), spread=spread)
        return None

    def copied_parameter(self, name: str, reference: Reference) -> RuleChoice | None:
        """A raw parameter that broadcasts: each copy receives its sample's gradient."""
        places = self._places(name, real=True)
        is_called = any(layer in self.probe.passed for layer, _ in self._places(name))
        if len(places) != 1 or is_called or self.probe.routed:
            return None  # routed rows are not the samples
        ((owner, own),) = places
        if isinstance(self.model.get_submodule(owner), parametrize.ParametrizationList):
            return None  # its functions may take any shape without a word
        for ones in (-1, 0) if len(reference.shape) > 1 else (0, 1, 2):
            if ones < 0 and reference.shape[0] != 1:
                continue
            copies = Copies(owner, self.model.get_submodule(owner), own, ones)
            passed = self._attempt(Recording(copies=[copies]))
            if len(passed) == 1:
                use = Dense(passed[0][1].reshape(1, self.probe.count, *reference.shape))
                if self.probe.agreement(use, reference):
                    return RuleChoice(True, copies=copies)
        return None

    # Shared by the strategies ------------------------------------------------------------------------------------

    def _places(self, name: str, real: bool = False) -> list[tuple[str, str]]:
        """(layer, the parameter's own name in it) for each layer that has the parameter."""
        places = [(layer, own) for layer, names in self.owners.items() for own, full in names.items() if full == name]
        return [place for place in places if not (real and place[0].startswith(FUNCTIONAL))]

    def _attempt(self, recording: Recording) -> list[tuple[Call, Tensor]]:
        """The calls of another pass with their gradients; empty if the model cannot run with this recording."""
        try:
            calls, grads = self.probe.again(recording)
        except Exception:  # a later layer does not broadcast over samples
            return []
        return [(call, grad.unsqueeze(0)) for call, grad in zip(calls, grads, strict=True) if grad is not None]

    def _agreement(self, name: str, uses: list[tuple[Part, Call, Tensor]], reference: Reference) -> bool | None:
        """Compare the sum of the uses, each by its rule, with autograd's gradient. A rule may raise any error."""
        found: list[Use] = []
        reason = "differs from autograd"
        try:
            for part, call, grad in uses:
                inputs, grads = arranged(call, grad, part.layout, self.probe.count)
                found.append(part.candidate.rule(call.module, inputs, grads)[part.own])
            if (tells := self.probe.agreement(merge(found), reference)) is not None:
                return tells
        except Exception as error:
            reason = f"raised {type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
        part = uses[min(len(found), len(uses) - 1)][0]
        if part.layout == "first":  # the most common layout
            self.rejected[name][part.candidate.label] = reason
        return None

    def _drop_wrong_guesses(self) -> None:
        """A rule that was chosen by a module's name or parameters must also hold on random inputs."""
        for layer, passed in self.probe.passed.items():
            self.candidates[layer] = [
                candidate
                for candidate in self.candidates[layer]
                if not candidate.is_guess or all(self._holds(candidate, call) for call, _ in passed)
            ]

    def _holds(self, candidate: Candidate, call: Call) -> bool:
        try:
            return self.probe.holds_on_random_inputs(call.module, candidate.rule, call.inputs)
        except Exception:  # whatever the module or the rule raises
            return False

    def _adopt_functional(self) -> None:
        """Treat the recorded ``F.linear`` calls as layers, with the linear rule as candidate."""
        names = {id(w): name for name, w in self.probe.weights.items()}
        for call in self.probe.calls:
            if call.is_functional:
                own = {"weight": call.name.removeprefix(FUNCTIONAL)}
                if id(call.module.bias) in names:
                    own["bias"] = names[id(call.module.bias)]
                self.owners[call.name] = own
                self.candidates[call.name] = [Candidate("linear", linear)]

    def _add(self, name: str, choice: RuleChoice) -> None:
        """Add a choice. A layer has one layout; its weight decides, unless the weight's gradient tells nothing."""
        if choice.copies is not None:
            self.plan.copies[name] = choice.copies
        for part in choice.parts:
            label, rule = part.candidate.label, part.candidate.rule
            layer = self.plan.layers.setdefault(part.layer, PlannedLayer(label, rule, part.layout))
            weight = (choice.tells, part.own == "weight")  # a bias alone fits several layouts
            if weight > self._deciding.get(part.layer, (False, False)):
                layer.label, layer.rule, layer.layout = label, rule, part.layout
                self._deciding[part.layer] = weight
            layer.parameters[part.own] = name
            if choice.spread is not None:
                self.spread[part.layer] = choice.spread

    def plan_of(self, wanted: Mapping[str, Tensor]) -> Plan:
        """The finished plan, with the recording and the memory per sample."""
        for name in wanted:
            if name in self.choices:
                self._add(name, self.choices[name])
            elif name not in self.plan.generic:
                self.plan.idle.append(name)
        plan, calls = self.plan, [call for call in self.probe.calls if call.name in self.plan.layers]
        plan.recording = Recording(
            {name: module for name, module in self.modules.items() if name in plan.layers},
            {name: p for name, p in wanted.items() if FUNCTIONAL + name in plan.layers},
            list(plan.copies.values()),
            self.spread,
        )
        count = self.probe.count
        shared = sum(call.shape.numel() for call in calls if call.name in self.spread)  # had no samples in the probe
        plan.outputs = (sum(call.shape.numel() for call in calls) - shared) // count + shared
        plan.outputs += sum(wanted[name].numel() for name in plan.copies)
        plan.patches = max((_unfolded(call) for call in calls), default=0) // count
        return plan


def _owners(model: nn.Module, wanted: Mapping[str, Tensor]) -> dict[str, dict[str, str]]:
    """Module name → {own parameter name: the wanted name}; a tied parameter has several owners."""
    names = {id(p): name for name, p in wanted.items()}
    owners: dict[str, dict[str, str]] = {}
    for module_name, module in model.named_modules():
        own = {n: names[id(p)] for n, p in module._parameters.items() if p is not None and id(p) in names}
        if own:
            owners[module_name] = own
    return owners


def _unfolded(call: Call) -> int:
    """Number of values that a layer's inputs unfold to: the patches of a convolution, else the inputs."""
    if not isinstance(call.module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        return call.inputs.numel()
    return call.shape.numel() // call.module.out_channels * kernel_shape(call.module)[1:].numel() * call.module.groups
