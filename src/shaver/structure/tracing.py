"""torch-pruning's dependency graph as another way to the same groups, with a time limit.

It follows the graph of gradients and has a rule for each kind of operation. What it takes for an elementwise operation
and is none would give wrong groups, and on some networks (grouped queries) it does not come to an end; so it runs under
a limit, and only those of its groups are returned that pass the probes of :mod:`shaver.structure.arrivals`.
"""

import ctypes
import sys
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from shaver.structure.arrivals import Arrivals
from shaver.structure.assembling import kind_of, makers, name_of
from shaver.structure.coupling import OUTPUT, RESIDUAL
from shaver.structure.groups import Group, Role, Slice
from shaver.structure.layers import Axis, tensor_names

T = TypeVar("T")


@dataclass(frozen=True)
class Item:
    """A consequence of removing units: positions in a module or parameter, and the unit each of them belongs to."""

    target: nn.Module | nn.Parameter
    outputs: bool
    positions: list[int]
    units: list[int]


class _Stopped(BaseException):
    """Ends the thread that took too long; no ``except Exception`` on its way catches it."""


def within(seconds: float, work: Callable[[], T], task: str, progress: Callable[[], str]) -> T:
    """The result of ``work()``, or a ``TimeoutError`` that says where it was after ``seconds``.

    The work is done in a thread of its own, into which an exception is raised when time is over. Python delivers it
    between two bytecodes: a loop in Python ends at once, a call into C when it returns. Unlike an alarm signal, this
    works in every thread, and no exception can arrive too late in the caller's.

    Args:
        seconds: The limit.
        work: To be done.
        task: What it is, for the error.
        progress: How far it got, for the error.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            with torch.enable_grad():  # Gradient mode is a thread's own; the graph that is traced is that of gradients.
                results.append(work())
        except BaseException as error:  # Handed to the caller below.
            errors.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        assert thread.ident is not None
        frame = sys._current_frames().get(thread.ident)
        where = f"in {frame.f_code.co_qualname}" if frame is not None else "at its end"
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident), ctypes.py_object(_Stopped))
        thread.join(5)
        raise TimeoutError(f"{task} took longer than seconds={seconds:g} and was stopped {where}, {progress()}.")
    if errors:
        raise RuntimeError(f"{task} failed with {type(errors[0]).__name__}: {errors[0]}") from errors[0]
    return results[0]


def trace(model: nn.Module, run: Callable[[Any], Tensor], batch: Any, seconds: float) -> list[list[Item]]:
    """Every group of torch-pruning's dependency graph, as it is.

    Raises:
        TimeoutError: After ``seconds``, with the place.
        RuntimeError: torch-pruning could not follow the model.
    """
    try:
        import torch_pruning
    except ImportError as error:
        raise ImportError("by='torch-pruning' needs torch-pruning: pip install \"shaver[prune]\".") from error

    groups: list[list[Item]] = []

    def build() -> list[list[Item]]:
        graph = torch_pruning.DependencyGraph()
        graph.build_dependency(model, batch, forward_fn=lambda _, given: run(given), verbose=False)
        for group in graph.get_all_groups():
            items = [(entry.dep.target.module, entry.dep.handler, entry.idxs, entry.root_idxs) for entry in group]
            groups.append([Item(at, graph.is_out_channel_pruning_fn(how), *indices) for at, how, *indices in items])
        return groups

    def progress() -> str:
        names = {id(module): name for name, module in model.named_modules()}
        last = names.get(id(groups[-1][0].target)) if groups else None
        done = f"after the group of {last!r}" if last else "before its first group"
        return f"{done}; by='probing' needs no such graph"

    with _restored(model):
        return within(seconds, build, f"torch-pruning's dependency graph of {type(model).__name__}", progress)


def traced_groups(
    arrivals: Arrivals, traced: list[list[Item]], residual: bool
) -> tuple[list[tuple[int, Group]], dict[str, str]]:
    """Groups with the place of their first layer in the order of calls, and the layers that are left out, and why."""
    probing = arrivals.probing
    found: list[tuple[int, Group]] = []
    left_out: dict[str, str] = {}
    names = tensor_names(probing.model)
    for items in traced:
        slices = _slices(items, arrivals, names)
        layers = makers(probing.order, {(piece.tensor, piece.dim) for piece in slices or ()})
        if slices is None or not layers:
            for item in items:
                for layer in arrivals.sources:
                    if layer.module is item.target and item.outputs:
                        left_out[layer.name] = "torch-pruning finds no even group for it"
            continue
        axes = {(piece.tensor, piece.dim): piece.index.shape[1] for piece in slices}
        roles: dict[Axis, Role] = {(piece.tensor, piece.dim): piece.role for piece in slices}
        summed = any((arrivals.reach[layer].reached & arrivals.summed).any() for layer in layers)
        if any(arrivals.reach[layer].output for layer in layers):
            reason = OUTPUT
        elif summed and not residual:
            reason = RESIDUAL
        elif "reads" not in roles.values() or not _arrive_within(arrivals, slices):
            reason = "its outputs arrive elsewhere than torch-pruning's graph says"
        else:
            kind = "residual" if summed else kind_of(axes, layers, roles, probing.order)
            units = len(slices[0].index)
            found.append((probing.order.index(layers[0]), Group(name_of(layers, axes, kind), kind, units, slices)))
            continue
        left_out.update({layer.name: reason for layer in layers})
    return found, left_out


def _slices(items: list[Item], arrivals: Arrivals, names: dict[int, str]) -> tuple[Slice, ...] | None:
    """What belongs to each unit, or None where the units are not alike."""
    by_module = {layer.module: layer for layer in arrivals.probing.order}
    held: dict[Axis, dict[int, list[int]]] = defaultdict(lambda: defaultdict(list))
    roles: dict[Axis, Role] = {}
    for item in items:
        layer = by_module.get(item.target) if isinstance(item.target, nn.Module) else None
        if layer is None:
            if isinstance(item.target, nn.Parameter) or any(True for _ in item.target.parameters()):
                return None  # A tensor whose dimension along the units is a guess.
            continue
        reads = layer.sort == "dense" and not item.outputs
        if isinstance(layer.module, nn.MultiheadAttention) or 1 < layer.groups < layer.width:
            return None
        for axis in layer.reads if reads else layer.makes:
            roles.setdefault(axis, "reads" if reads else "makes")
            for position, unit in zip(item.positions, item.units, strict=True):
                if position not in held[axis][unit]:
                    held[axis][unit].append(position)
    units = sorted({unit for axis in held.values() for unit in axis})
    slices = []
    for axis, positions in held.items():
        arrivals.probing.add_nodes(axis)
        if len({len(positions.get(unit, ())) for unit in units}) != 1:
            return None
        slices.append(Slice(*axis, torch.tensor([sorted(positions[unit]) for unit in units]), roles[axis]))
    return tuple(slices) if len(units) > 1 else None


def _arrive_within(arrivals: Arrivals, slices: tuple[Slice, ...]) -> bool:
    """Whether every other unit, spoiled at all layers that make it, arrives only where its own slices are."""
    probing = arrivals.probing
    own = torch.zeros(probing.size, dtype=torch.bool)
    for piece in slices:
        own[probing.range_of((piece.tensor, piece.dim))][piece.index[::2].flatten()] = True
    layers = {layer: own[probing.range_of(layer.makes[0])] for layer in arrivals.sources}
    seen = probing.spread({layer: mask for layer, mask in layers.items() if mask.any()})
    return not seen.output and not bool((seen.reached & ~own).any())


@contextmanager
def _restored(model: nn.Module) -> Iterator[None]:
    """Gradients for every tensor, as the graph needs them, and afterwards what was before; no hook stays behind."""
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    hooks = [(module, set(module._forward_hooks)) for module in model.modules()]
    for parameter, _ in wanted:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter, before in wanted:
            parameter.requires_grad_(before)
        for module, kept in hooks:
            for key in set(module._forward_hooks) - kept:
                del module._forward_hooks[key]
