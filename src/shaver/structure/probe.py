"""Which layers read a channel: change the channel, run the model, and observe which inputs differ.

Every layer returns from memory what it returned in one clean pass. So only the operations *between* layers are
computed, and a change at one layer's output stops at the inputs of the layers that read it. Nothing is assumed about
these operations: reshapes, concatenations, gates, attention and a user's own code are executed as they are.

No single change passes every operation: a value that decreases is lost behind a ReLU if it was negative, and NaN is
lost in code that selects. So the values of a channel are changed in three ways, in turns, until each value was changed
in each way. One turn is enough where every reader sees values of all three kinds, as convolutions do.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from shaver.curvature.capture import copied
from shaver.measure.evaluating import unfused_attention
from shaver.structure.groups import tensors_of
from shaver.structure.layers import Axis, Layer, layers_of

How = Literal["spoil", "prick", "sway", "zero"]

#: What is added to the values of a channel: the first step to the first value, and so on, cyclically.
_STEPS = {
    "spoil": (float("nan"), 100.0, -100.0),
    "prick": (float("nan"), 0.0, 0.0),
    "sway": (100.0, -100.0),
}


@dataclass(frozen=True)
class Change:
    """A change of some channels of a layer's output, or of some positions of a tensor of the model."""

    where: Layer | Axis  # the layer, or the dimension of a parameter or buffer
    mask: Tensor  # which channels or positions
    # "spoil" makes a third of the values NaN, which passes all arithmetic, and moves the others far up and
    # down, which passes code that compares and selects. "prick" makes the third NaN and leaves the others,
    # "sway" only moves values, "zero" sets them to zero.
    how: How


@dataclass
class Pass:
    """What one forward pass showed."""

    reached: Tensor  # for every node (position of a dimension), whether a value there differs from the reference
    output: bool = False  # whether the model's output differs
    # what each layer received, per call, as a reference for another pass
    seen: dict[tuple[str, int], list[Tensor]] = field(default_factory=dict)
    outputs: list[Tensor] = field(default_factory=list)  # the model's output
    failed: bool = False  # whether the model did not run with the changes; then everything counts as reached


class Probe:
    """A model whose layers answer from memory while the ``with`` block lasts."""

    def __init__(self, model: nn.Module, forward: Callable[[Any], Tensor], batch: Any, seconds: float) -> None:
        self._known, self.left_out = layers_of(model)  # left out: layers that cannot be probed, and why
        self.order: list[Layer] = []  # in which the model calls its layers
        self.tensors = tensors_of(model)
        self.nodes: dict[Axis, tuple[int, int]] = {}  # dimension → number of its first node, and its size
        self.size = 0  # number of nodes
        for layer in self._known:
            for axis in (*layer.makes, *layer.reads):
                self.add_nodes(axis)
        self._forward, self._batch = forward, batch
        self._seconds, self._deadline = seconds, time.monotonic() + seconds
        self._passes = 0
        self._answers: dict[tuple[str, int], Any] = {}
        self._calls: Counter[str] = Counter()
        self._changes: dict[str, Change] = {}
        self._reference: Pass | None = None
        self._now = Pass(torch.zeros(0))
        self._real, self._keep, self._turn = True, False, 0
        self._onward: How = "spoil"
        self._even: set[Layer] = set()
        self._patched = ExitStack()

    def add_nodes(self, axis: Axis) -> None:
        """Make the positions of a dimension nodes."""
        if axis not in self.nodes:
            size = self.tensors[axis[0]].shape[axis[1]]
            self.nodes[axis] = (self.size, size)
            self.size += size

    def range_of(self, axis: Axis) -> slice:
        """The nodes of a dimension."""
        start, size = self.nodes[axis]
        return slice(start, start + size)

    def __enter__(self) -> "Probe":
        for layer in self._known:
            self._patched.enter_context(_answering(layer.module, partial(self._answer, layer)))
        self._patched.enter_context(unfused_attention())
        try:
            self.clean = self.run([], keep=True)
        except BaseException:
            self._patched.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self._patched.close()

    def run(
        self,
        changes: Sequence[Change],
        *,
        reference: Pass | None = None,
        batch: Any = None,
        real: bool = False,
        keep: bool = False,
        turn: int = 0,
    ) -> Pass:
        """One forward pass with some changes, compared with a reference.

        Args:
            changes: At most one per layer.
            reference: The clean pass by default.
            batch: Other inputs than those of the clean pass.
            real: Compute grouped convolutions, instead of changing every output of a group that a change reaches.
            keep: Keep what the layers received, so that this pass can be a reference.
            turn: The step with which a change begins at the first value of a channel.
        """
        self._passes += 1
        self._calls.clear()
        self._reference = reference or getattr(self, "clean", None)
        self._real = real or self._reference is None
        self._keep, self._turn = keep, turn
        self._onward = "prick" if any(change.how == "prick" for change in changes) else "spoil"
        self._now = Pass(torch.zeros(self.size, dtype=torch.bool))
        self._changes = {change.where.name: change for change in changes if isinstance(change.where, Layer)}
        in_tensors = [change for change in changes if not isinstance(change.where, Layer)]
        try:
            with self._changed_tensors(in_tensors):
                output = self._forward(self._batch if batch is None else batch)
        except Exception as error:
            if self._reference is None or isinstance(error, TimeoutError):
                raise
            # Code that depends on the changed values, such as routing, did not run: they may arrive anywhere.
            return Pass(torch.ones(self.size, dtype=torch.bool), output=True, failed=True)
        self._now.outputs = [output.detach().clone()]
        if self._reference is not None:
            self._now.output = bool(differs(output, self._reference.outputs[0]).any())
        return self._now

    def turns(self, changes: Sequence[Change], **options: Any) -> Pass:
        """What is reached in any of the passes that together apply every step to every value of a change."""
        count = max((len(_STEPS[change.how]) for change in changes if change.how in _STEPS), default=1)
        passes = [self.run(changes, turn=turn, **options) for turn in range(count)]
        reached = torch.stack([seen.reached for seen in passes]).any(0)
        return Pass(reached, any(seen.output for seen in passes), failed=any(seen.failed for seen in passes))

    def spread(self, changes: Mapping[Layer | Axis, Tensor]) -> Pass:
        """Where spoiled channels arrive."""
        spoiled = [Change(where, mask, "spoil") for where, mask in changes.items()]
        return self.run(spoiled) if changes.keys() <= self._even else self.turns(spoiled)

    def reach(self, layer: Layer) -> Pass:
        """Where the outputs of a layer arrive; also records whether one turn is enough for this layer.

        It is if NaN arrives everywhere from each third of the values: maps that are pooled or read by a convolution.
        It is not if a map is flattened, so that each of its values is read at a position of its own.
        """
        seen = self.turns([Change(layer, everything(layer.width), "spoil")])
        pricks = [Change(layer, everything(layer.width), "prick")]
        for turn in range(len(_STEPS["prick"])):
            part = self.run(pricks, turn=turn)
            if part.output != seen.output or not torch.equal(part.reached, seen.reached):
                return seen
        self._even.add(layer)
        return seen

    @contextmanager
    def _changed_tensors(self, changes: Sequence[Change]) -> Iterator[None]:
        kept: dict[str, Tensor] = {}
        try:
            for change in changes:
                assert not isinstance(change.where, Layer)
                name, dim = change.where
                tensor = self.tensors[name]
                if name not in kept:
                    kept[name] = tensor.data
                    tensor.data = tensor.data.clone()
                self._apply(tensor.data, dim, change.mask, change.how)
            yield
        finally:
            for name, data in kept.items():
                self.tensors[name].data = data

    def _answer(self, layer: Layer, original: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """What a layer returns in place of ``original(*args, **kwargs)``."""
        if time.monotonic() > self._deadline:
            raise TimeoutError(
                f"the search for groups took longer than seconds={self._seconds:g} and stopped in layer "
                f"{layer.name!r}, forward pass {self._passes}; allow more seconds=, or pass a smaller example."
            )
        key = (layer.name, self._calls[layer.name])
        self._calls[layer.name] += 1
        if self._reference is None and layer not in self.order:
            self.order.append(layer)
        if layer.sort == "norm":
            return self._received(layer, key, [original(*args, **kwargs)])[0]
        inputs = self._received(layer, key, _arrivals(layer, args, kwargs))
        # An expert to which other tokens are routed than in the clean pass has no answer of that shape.
        known = key in self._answers and inputs[0].shape == self.clean.seen[key][0].shape
        if self._reference is None or (layer.sort == "grouped" and (self._real or not known)):
            answer = original(*args, **kwargs)
            if self._reference is None:
                self._answers[key] = copied(answer)
            return answer
        answer = copied(self._answers[key]) if known else original(*args, **kwargs)
        main = answer[0] if isinstance(answer, tuple) else answer
        if layer.sort == "grouped":
            self._spoil_groups(layer, main, key, inputs[0])
        change = self._changes.get(layer.name)
        if change is not None:
            self._apply(main, layer.output_dim, change.mask, change.how)
        return answer

    def _received(self, layer: Layer, key: tuple[str, int], values: list[Tensor]) -> list[Tensor]:
        """Keep what a layer received, and mark the nodes where it differs from the reference."""
        if self._keep:
            self._now.seen[key] = copied(values)
        if self._reference is None or key not in self._reference.seen or layer.sort == "grouped":
            return values
        axes, dim = (layer.makes, layer.output_dim) if layer.sort == "norm" else (layer.reads, layer.input_dim)
        for at, (value, other) in enumerate(zip(values, self._reference.seen[key], strict=True)):
            if not torch.equal(value, other):
                hit = along(differs(value, other), dim)
                # Queries, keys and values of an attention module share one weight or have one each.
                for axis in axes if layer.sort == "norm" or len(axes) == 1 else axes[at : at + 1]:
                    self._now.reached[self.range_of(axis)] |= hit
        return values

    def _spoil_groups(self, layer: Layer, output: Tensor, key: tuple[str, int], value: Tensor) -> None:
        assert self._reference is not None
        if torch.equal(value, self._reference.seen[key][0]):
            return
        hit = along(differs(value, self._reference.seen[key][0]), layer.input_dim).reshape(layer.groups, -1).any(1)
        if not hit.any():
            return
        for axis in layer.makes:
            self._now.reached[self.range_of(axis)] |= hit.repeat_interleave(self.nodes[axis][1] // layer.groups)
        self._apply(output, layer.output_dim, hit.repeat_interleave(layer.width // layer.groups), self._onward)

    def _apply(self, tensor: Tensor, dim: int, mask: Tensor, how: How) -> None:
        channels = tensor.movedim(dim, 0)
        others = channels[0]
        mask = mask.to(tensor.device)
        if how == "zero":
            channels[mask] = 0
            return
        count = torch.arange(others.numel(), device=tensor.device).reshape(others.shape)
        steps = torch.tensor(_STEPS[how], dtype=tensor.dtype, device=tensor.device)
        steps = steps[(count + self._turn) % len(steps)]
        # Uneven steps, so that no mean or difference cancels them.
        channels[mask] += steps * (1 + count.to(tensor.dtype) / others.numel())


@contextmanager
def _answering(module: nn.Module, answer: Callable[..., Any]) -> Iterator[None]:
    """Inside the block, a call of the module calls ``answer`` with the module's own ``forward`` and the arguments."""
    own = module.__dict__.get("forward")
    module.__dict__["forward"] = partial(answer, module.forward)
    try:
        yield
    finally:
        if own is None:
            del module.__dict__["forward"]
        else:
            module.__dict__["forward"] = own


def differs(value: Tensor, other: Tensor) -> Tensor:
    """Where two tensors differ; NaN in both counts as equal."""
    if value.shape != other.shape:
        return torch.ones_like(value, dtype=torch.bool)
    return (value != other) & ~(value.isnan() & other.isnan())


def along(hit: Tensor, dim: int) -> Tensor:
    """Any over every other dimension."""
    return hit.movedim(dim, 0).flatten(1).any(1).cpu()


def _arrivals(layer: Layer, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Tensor]:
    tensors = [value for value in (*args, *kwargs.values()) if isinstance(value, Tensor)]
    return tensors[: 3 if isinstance(layer.module, nn.MultiheadAttention) else 1]


def everything(size: int) -> Tensor:
    """A mask of all positions."""
    return torch.ones(size, dtype=torch.bool)
