"""Which rule serves which parameter, and how a recorded pass becomes per-sample gradients by it.

Plans are made by :mod:`shaver.curvature.planning`.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field

from torch import Tensor, nn

from shaver.curvature.blocks import at_least_float32
from shaver.curvature.capture import Call, Copies, Spread
from shaver.curvature.rules import Rule
from shaver.curvature.uses import Dense, Use, merge

#: Where the samples may stand in a layer's input: dimension 0, dimension 1, or dimension 0 together with others,
#: sample by sample or position by position.
LAYOUTS = ("first", "second", "folded", "folded last")


@dataclass(frozen=True)
class Choice:
    """A rule for a module, and where the samples stand in its input.

    Attributes:
        label: The rule's name.
        rule: The rule.
        layout: One of :data:`LAYOUTS`.
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
        spread: Modules whose input has no samples: module name → how they are given one copy a sample.
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
    spread: dict[str, Spread] = field(default_factory=dict)
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
                use = Dense(at_least_float32(grad).reshape(len(grad), batch, *call.inputs.shape))
                found.setdefault(raw[call.name, call.parameter], []).append(use)
                continue
            keys = [key for key in self.choices if key[0] == call.name]
            if all(name in doubted for _, _, name in keys):
                continue
            choice = self.choices[keys[0]]
            uses = choice.rule(call.module, *arranged(call, grad, choice.layout, batch))
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
        for (module, _, name), choice in self.choices.items():
            place = "" if choice.layout == "first" else f" ({choice.layout})"
            place = " (one copy a sample)" if module in self.spread else place
            words.setdefault(name, []).append(choice.label + place)
        labels = {name: " + ".join(parts) for name, parts in words.items()}
        labels |= dict.fromkeys(self.copies, "one copy a sample")
        labels |= {name: f"generic: {reason}" for name, reason in self.generic.items()}
        return labels | dict.fromkeys(self.idle, "no gradient reaches it")


def arranged(call: Call, grad: Tensor, layout: str, count: int) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients with the samples first, in at least single precision."""
    inputs, grads = call.inputs, grad.reshape(len(grad), *call.shape)
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
    return at_least_float32(inputs), at_least_float32(grads)
