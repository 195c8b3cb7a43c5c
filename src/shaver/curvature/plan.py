"""The plan: the rule of each parameter, and how per-sample gradients are computed from a recorded pass.

:mod:`shaver.curvature.rule_choice` makes plans.
"""

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from shaver.curvature.blocks import at_least_float32
from shaver.curvature.capture import Call, Copies, Recording, Samples
from shaver.curvature.rules import Rule
from shaver.curvature.uses import Dense, Use, merge

#: The dimension of a layer's input that holds the samples: 0, 1, or 0 folded with other dimensions, with the samples
#: outermost ("folded") or innermost ("folded last").
LAYOUTS = ("first", "second", "folded", "folded last")


@dataclass
class PlannedLayer:
    """A layer and the rule for some of its parameters."""

    label: str  # the rule's name
    rule: Rule
    layout: str  # one of LAYOUTS
    # the parameter's own name in the layer → its name in the model
    parameters: dict[str, str] = field(default_factory=dict)


@dataclass
class Plan:
    """How the curvature of each trainable parameter is computed."""

    # layers by their name in the model (or that of an F.linear call)
    layers: dict[str, PlannedLayer] = field(default_factory=dict)
    # raw parameters with one copy per sample, by parameter name
    copies: dict[str, Copies] = field(default_factory=dict)
    generic: dict[str, str] = field(default_factory=dict)  # parameters that get the generic rule, with the reason
    # parameters without a gradient in the probe; each batch checks them again
    idle: list[str] = field(default_factory=list)
    recording: Recording = field(default_factory=Recording)  # what to record of a pass
    samples: Samples = field(default_factory=Samples)  # which entries of a batch have one row per sample
    routed: bool = False  # whether the data may decide which rows a layer receives; if so, each batch is checked
    alters_inputs: bool = False  # whether the network changes its input in place
    vectorised: bool = True  # whether the generic rule tries vmap; switched off where vmap fails
    outputs: int = 0  # number of values per sample in the recorded outputs, which a backward pass keeps in memory
    patches: int = 0  # the largest number of values per sample that any layer's inputs unfold to

    def uses(
        self, calls: Sequence[Call], grads: Sequence[Tensor | None], count: int, without: Collection[str] = ()
    ) -> Iterator[tuple[str, Use]]:
        """Every planned parameter with its merged use, one parameter at a time, except those in ``without``.

        ``grads`` has the output gradients ``(K, *output.shape)`` of each call, or None.
        """
        found: dict[str, list[Use]] = {}
        for call, grad in zip(calls, grads, strict=True):
            names = [name for name in self.served(call).values() if name not in without]
            if grad is None or not names:
                continue
            if call.parameter is not None:
                use = Dense(at_least_float32(grad).reshape(len(grad), count, *call.inputs.shape))
                found.setdefault(names[0], []).append(use)
                continue
            layer = self.layers[call.name]
            uses = layer.rule(call.module, *arranged(call, grad, layer.layout, count))
            for own, name in layer.parameters.items():
                if name in names:
                    found.setdefault(name, []).append(uses[own])
        for name, parts in found.items():
            yield name, merge(parts)

    def served(self, call: Call) -> dict[str, str]:
        """The parameters whose gradients a call gives: own name → name in the model."""
        if call.parameter is None:
            return self.layers[call.name].parameters
        places = ((c, name) for name, c in self.copies.items())
        return {c.own: name for c, name in places if (c.name, c.own) == (call.name, call.parameter)}

    def doubted(self, calls: Sequence[Call], count: int) -> set[str]:
        """Parameters of layers whose inputs do not fit the planned layout; they get the generic rule."""
        layers = [(call, self.layers[call.name]) for call in calls if call.parameter is None]
        wrong = (call for call, layer in layers if not _fits(call.inputs.shape, layer.layout, count))
        return {name for call in wrong for name in self.served(call).values()}

    def misrouted(self, calls: Sequence[Call], outputs: Tensor | GradientEdge, direction: Tensor) -> set[str]:
        """Parameters of layers in which a row does not belong to the planned sample.

        Two backward passes find them: if the output gradient of each sample n is multiplied by its own weight w_n, then
        the gradient of a row of sample n must be w_n times as large.
        """
        wrong = self.doubted(calls, count := len(direction))
        kept = [call for call in calls if call.parameter is None and not wrong & set(self.served(call).values())]
        if not kept:
            return wrong
        weights = 1 + torch.randperm(count, generator=torch.Generator().manual_seed(0)).to(direction) / count
        weighted = direction * weights.view(-1, *(1,) * (direction.ndim - 1))
        plain, other = (
            torch.autograd.grad(outputs, [call.edge for call in kept], rows, retain_graph=True, allow_unused=True)
            for rows in (direction, weighted)
        )
        for call, *both in zip(kept, plain, other, strict=True):
            if both[0] is not None and both[1] is not None:
                layout = self.layers[call.name].layout
                one, two = (arranged(call, grad.unsqueeze(0), layout, count)[1][0].flatten(1) for grad in both)
                error = {torch.float64: 1e-8, torch.float32: 1e-3}.get(both[0].dtype, 0.1)
                missed = (two - one * weights.to(one).unsqueeze(1)).abs()
                if bool((missed > error * (one.abs() + 1e-2 * one.abs().max())).any()):
                    wrong |= set(self.served(call).values())
        return wrong

    def unseen(self, calls: Sequence[Call]) -> list[str]:
        """Parameters without the generic rule and without a recorded call."""
        seen = {name for call in calls for name in self.served(call).values()}
        planned = [name for layer in self.layers.values() for name in layer.parameters.values()]
        return [name for name in dict.fromkeys([*planned, *self.copies, *self.idle]) if name not in seen]

    def single_uses(self, calls: Sequence[Call]) -> list[bool]:
        """Whether the parameters of each call occur in no other call."""
        names = [list(self.served(call).values()) for call in calls]
        counts = Counter(name for several in names for name in several)
        return [all(counts[name] == 1 for name in several) for several in names]

    def labels(self) -> dict[str, str]:
        """Parameter → rule, in words."""
        words: dict[str, list[str]] = {}
        for module, layer in self.layers.items():
            place = "" if layer.layout == "first" else f" ({layer.layout})"
            place = " (one copy per sample)" if module in self.recording.spread else place
            for name in layer.parameters.values():
                words.setdefault(name, []).append(layer.label + place)
        labels = {name: " + ".join(parts) for name, parts in words.items()}
        labels |= dict.fromkeys(self.copies, "one copy per sample")
        labels |= {name: f"generic: {reason}" for name, reason in self.generic.items()}
        return labels | dict.fromkeys(self.idle, "no gradient reaches it")


def _fits(shape: torch.Size, layout: str, count: int) -> bool:
    """Whether a tensor of this shape can hold ``count`` samples in this layout."""
    if layout == "first":
        return shape[0] == count
    if layout == "second":
        return len(shape) > 1 and shape[1] == count
    return shape[0] > 0 and shape[0] % count == 0


def arranged(call: Call, grad: Tensor, layout: str, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients with the samples first, in at least single precision."""
    if not (_fits(call.inputs.shape, layout, count) and _fits(call.shape, layout, count)):
        raise ValueError(f"the samples do not come {layout}")
    inputs, grads = call.inputs, grad.reshape(len(grad), *call.shape)
    if layout == "second":
        inputs, grads = inputs.transpose(0, 1), grads.transpose(1, 2)
    elif layout == "folded":
        inputs = inputs.reshape(count, -1, *inputs.shape[1:])
        grads = grads.reshape(len(grads), count, -1, *grads.shape[2:])
    elif layout == "folded last":
        inputs = inputs.reshape(-1, count, *inputs.shape[1:]).transpose(0, 1)
        grads = grads.reshape(len(grads), -1, count, *grads.shape[2:]).transpose(1, 2)
    return at_least_float32(inputs), at_least_float32(grads)
