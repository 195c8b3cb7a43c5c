"""Moments of the inputs of one transformer block's layers, in the order of its forward pass.

All layers of a stage read one tensor, as the query, key and value layers do. Each window stops at every stage until the
stage's layers are pruned, and goes on with what is left of them: one pass serves the whole block. A copy of the dense
block runs beside it on the dense model's hidden states, where the dense outputs are the target.
"""

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass
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
    rows: int = 0


def is_layer(module: nn.Module) -> bool:
    """Whether the module multiplies by a weight matrix that can be pruned here."""
    return isinstance(module, nn.Linear) or is_transposed_linear(module)


def matrix(module: nn.Module) -> Tensor:
    """The weight as ``(outputs, inputs)``, sharing the parameter's memory."""
    weight: Tensor = module.weight.detach()  # type: ignore[assignment, operator]
    return weight.t() if is_transposed_linear(module) else weight


@torch.no_grad()
def find_stages(block: nn.Module, call: Call, hidden: Tensor) -> list[BlockStage]:
    """Run a block once and note which layers read which tensor, and where outputs join the residual stream."""
    inputs: dict[str, Tensor] = {"": hidden}
    outputs: dict[str, Tensor] = {}
    counts: dict[str, int] = {}
    handles = []
    for path, module in block.named_modules():
        if path and not list(module.children()):

            def note(module: nn.Module, args: Any, out: Any, path: str = path) -> None:
                if args and isinstance(args[0], Tensor) and isinstance(out, Tensor):
                    inputs[path], outputs[path] = args[0], out
                    counts[path] = counts.get(path, 0) + 1

            handles.append(module.register_forward_hook(note))
    try:
        last = call(block, hidden)
    finally:
        for handle in handles:
            handle.remove()
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
        dense: The same for the dense model: its outputs are then the target. ``block`` is copied at the start for it.
    """
    twin = None if dense is None else deepcopy(block)
    streams = sorted({name for stage in stages for name in stage.residual.values()} - {""})
    firsts = {stage.paths[0]: stage for stage in stages}
    known: dict[Lane, dict[str, Tensor]] = {}
    left: dict[Lane, Tensor] = {}

    def visit(lane: Lane, path: str, _: nn.Module, args: Any, kwargs: Mapping[str, Any], __: Any) -> None:
        if path in streams:
            known[lane][path] = args[0]
        if path in firsts:
            lane.stop(firsts[path], args[0])

    paths = [*firsts, *streams]

    def passes(module: nn.Module, states: list[Tensor]) -> list[Callable[[], None]]:
        def run(place: int) -> None:
            left[lanes_of[id(module)][place]] = calls[place](module, states[place])

        return [lambda place=place: run(place) for place in range(len(states))]  # type: ignore[misc]

    lanes_of: dict[int, list[Lane]] = {}
    with ExitStack() as stack:
        networks = [(block, hidden)] if twin is None or dense is None else [(block, hidden), (twin, dense)]
        for module, states in networks:
            stack.enter_context(visiting(module, paths, visit, before=True))
            own = stack.enter_context(lanes(passes(module, states)))
            lanes_of[id(module)] = own
            known |= {lane: {"": state} for lane, state in zip(own, states, strict=True)}
        present = lanes_of[id(block)]
        twins = None if twin is None else lanes_of[id(twin)]
        for stage in stages:
            total: StageMoments | None = None
            for place, lane in enumerate(present):
                x = _rows(_at(stage, lane))
                other = None if twins is None else twins[place]
                known_x = x if other is None else _rows(_at(stage, other))
                second = _squared(x)
                cross = second if other is None else (known_x.t() @ x).double()
                drift = {}
                if other is not None:
                    for path, name in stage.residual.items():
                        gap = _rows(known[other][name]) - _rows(known[lane][name])
                        drift[path] = (gap.t() @ x).double()
                if total is None:
                    total = StageMoments(second, cross, drift, len(x))
                    continue
                total.second += second
                if other is not None:
                    total.cross += cross
                    for path, sums in drift.items():
                        total.drift[path] += sums
                total.rows += len(x)
            assert total is not None
            if not bool(total.second.isfinite().all()):
                raise ValueError(
                    f"the inputs of {' and '.join(stage.paths)} hold NaN or infinity: the model is broken."
                )
            yield stage, total
        for module, states in networks:
            for place, lane in enumerate(lanes_of[id(module)]):
                lane.advance()
                states[place] = left.pop(lane)


def _at(stage: BlockStage, lane: Lane) -> Tensor:
    found = lane.advance()
    if found is None or found[0] is not stage:
        raise ValueError(
            f"the layers of a block ran in another order than for the first window (expected {stage.paths[0]!r}): "
            "every window must run the same layers in the same order."
        )
    value: Tensor = found[1]
    return value


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
