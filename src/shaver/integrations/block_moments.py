"""Moments of the inputs of one transformer block's layers, in the order of its forward pass.

All layers of a stage read one tensor, as the query, key and value layers do. Each window stops at every stage until the
stage's layers are pruned, and goes on with what is left of them: one pass serves the whole block. A copy of the dense
block runs beside it on the dense model's hidden states, where the dense outputs are the target.
"""

from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shaver.criteria.prunable_weights import is_transposed_linear
from shaver.repairing.lockstep import Lane, lanes, visiting

Call = Callable[[nn.Module, Tensor], Tensor]
#: Columns of a symmetric product that are multiplied at a time.
COLUMNS = 256


@dataclass(frozen=True)
class BlockStage:
    """Layers of a block that read the same tensor.

    Attributes:
        paths: Their names within the block, in the order of the forward pass.
        residual: For each layer whose output is added to the residual stream, the module whose input the stream is at
            that moment; the empty name is the block itself.
    """

    paths: tuple[str, ...]
    residual: Mapping[str, str]


@dataclass
class StageMoments:
    """Sums over all positions of all windows, in float64.

    Attributes:
        second: Σ x xᵀ of the inputs.
        cross: Σ x̂ xᵀ with the dense model's inputs x̂; ``second`` itself without a dense copy.
        drift: For each layer that adds to the residual stream h, Σ (ĥ − h) xᵀ: its distance from the dense one.
        rows: Number of positions.
    """

    second: Tensor
    cross: Tensor
    drift: dict[str, Tensor]
    rows: int

    def add(self, other: "StageMoments") -> None:
        """Add the sums of another batch, in place."""
        if self.cross is not self.second:
            self.cross += other.cross
        self.second += other.second
        for path, sums in other.drift.items():
            self.drift[path] += sums
        self.rows += other.rows


def is_layer(module: nn.Module) -> bool:
    """Whether the module multiplies by a weight matrix that can be pruned here."""
    return isinstance(module, nn.Linear) or is_transposed_linear(module)


def matrix(module: nn.Module) -> Tensor:
    """The weight as ``(outputs, inputs)``, sharing the parameter's memory."""
    weight: Tensor = module.weight.detach()  # type: ignore[assignment, operator]
    return weight.t() if is_transposed_linear(module) else weight


def weight_scores(weight: Tensor, second: Tensor, ridge: float, criterion: str) -> Tensor:
    """What each weight is ranked by: ``"opd"``, ``"wanda"`` or ``"magnitude"``."""
    if criterion == "magnitude":
        return weight.abs()
    squares = second.diagonal()
    return weight.square() * (squares + ridge) if criterion == "opd" else weight.abs() * squares.sqrt()


@torch.no_grad()
def find_stages(block: nn.Module, call: Call, hidden: Tensor) -> list[BlockStage]:
    """Run a block once and note which layers read which tensor, and where outputs join the residual stream."""
    inputs: dict[str, Tensor] = {"": hidden}
    outputs: dict[str, Tensor] = {}
    counts: Counter[str] = Counter()

    def note(path: str, _: nn.Module, args: Any, out: Any) -> None:
        if args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
            inputs[path], outputs[path] = args[0], out
            counts[path] += 1

    with ExitStack() as hooks:
        for path, module in block.named_modules():
            if path and not list(module.children()):
                hooks.enter_context(module.register_forward_hook(partial(note, path)))
        last = call(block, hidden)
    layers = [path for path in outputs if is_layer(block.get_submodule(path)) and counts[path] == 1]
    grouped: dict[int, list[str]] = {}
    for path in layers:
        grouped.setdefault(id(inputs[path]), []).append(path)
    streams = {path: x for path, x in inputs.items() if x.shape == hidden.shape and path not in layers}
    later = [*streams.values(), last]
    stages = []
    for paths in grouped.values():
        residual = {}
        for path in paths:
            y = outputs[path]
            for name, x in streams.items():
                if y.shape == x.shape and any(_equal(x + y, z) for z in later):
                    residual[path] = name
                    break
        stages.append(BlockStage(tuple(paths), residual))
    return stages


def _equal(a: Tensor, b: Tensor) -> bool:
    return bool(torch.allclose(a, b, rtol=1e-4, atol=1e-5 * float(b.abs().max())))


def stage_moments(
    block: nn.Module,
    stages: Sequence[BlockStage],
    calls: Sequence[Call],
    hidden: list[Tensor],
    dense: list[Tensor] | None = None,
) -> Generator[tuple[BlockStage, StageMoments]]:
    """The moments of one stage after the other; changes to the block are in force for the stages after it.

    Args:
        block: In float32 and eval mode.
        stages: From :func:`find_stages`.
        calls: For each batch of windows, how the block is called.
        hidden: For each batch, what enters the block; replaced by what leaves it.
        dense: The same for the dense model, whose outputs are then the target. A copy of the block runs on it.
    """
    networks = [(block, hidden)] if dense is None else [(block, hidden), (deepcopy(block), dense)]
    streams = sorted({name for stage in stages for name in stage.residual.values()} - {""})
    firsts = {stage.paths[0]: stage for stage in stages}
    known: dict[Lane, dict[str, Tensor]] = {}  # the residual stream at the modules that read it

    def visit(lane: Lane, path: str, _: nn.Module, args: Any, kwargs: Mapping[str, Any], __: Any) -> None:
        if path in streams:
            known[lane][path] = args[0]
        if path in firsts:
            lane.stop(firsts[path], args[0])

    def run(module: nn.Module, states: list[Tensor], place: int) -> None:
        states[place] = calls[place](module, states[place])

    with ExitStack() as stack:
        all_lanes = []
        for module, states in networks:
            stack.enter_context(visiting(module, [*firsts, *streams], visit, before=True))
            own = stack.enter_context(lanes([partial(run, module, states, place) for place in range(len(states))]))
            known |= {lane: {"": state} for lane, state in zip(own, states, strict=True)}
            all_lanes.append(own)
        for stage in stages:
            batches = (_batch_moments(stage, known, *batch) for batch in zip(*all_lanes, strict=True))
            total = next(batches)
            for more in batches:
                total.add(more)
            if not bool(total.second.isfinite().all()):
                raise ValueError(
                    f"the inputs of {' and '.join(stage.paths)} hold NaN or infinity: the model is broken."
                )
            yield stage, total
        for own in all_lanes:
            for lane in own:
                lane.advance()


def _batch_moments(
    stage: BlockStage, known: Mapping[Lane, Mapping[str, Tensor]], lane: Lane, twin: Lane | None = None
) -> StageMoments:
    x = _rows(lane.advance_to(stage, stage.paths[0]))
    second = _squared(x)
    if twin is None:
        return StageMoments(second, second, {}, len(x))
    dense = _rows(twin.advance_to(stage, stage.paths[0]))
    drift = {}
    for path, name in stage.residual.items():
        gap = _rows(known[twin][name]) - _rows(known[lane][name])
        drift[path] = (gap.t() @ x).double()
    return StageMoments(second, (dense.t() @ x).double(), drift, len(x))


def _rows(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _squared(x: Tensor) -> Tensor:
    """Σ x xᵀ in float64, of products in float32; only the upper half is multiplied."""
    size = x.shape[1]
    total = torch.zeros(size, size, dtype=torch.float64)
    for start in range(0, size, COLUMNS):
        stop = min(start + COLUMNS, size)
        total[start:stop, start:] = x[:, start:stop].t() @ x[:, start:]
        total[stop:, start:stop] = total[start:stop, stop:].t()
    return total
