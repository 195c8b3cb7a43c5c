"""The groups of any model, from where its channels arrive."""

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import replace
from itertools import takewhile
from typing import Any, get_args

import torch
from torch import Tensor, nn

from shaver.batches import Forward, check_values, outputs_in
from shaver.curvature.capture import copied
from shaver.measure.evaluating import evaluating
from shaver.measure.example import call
from shaver.naming import check_flags, check_name
from shaver.structure.arrivals import Arrivals
from shaver.structure.coupling import Coupling
from shaver.structure.groups import Group, Groups, Kind, Role, Slice
from shaver.structure.inputs import VariedInputs, check_example, short
from shaver.structure.layers import Axis, Layer, packed_heads
from shaver.structure.probe import Probe

_MIXED = "its outputs are mixed with one another before a layer reads them, so none can be removed alone"


def find_groups(
    model: nn.Module,
    example: Any,
    *,
    forward: Forward | None = None,
    residual: bool = False,
    seconds: float = 60.0,
    kinds: Collection[str] | None = None,
) -> Groups:
    """Find which channels, hidden units and attention heads of a model must be removed together.

    Example:
        >>> groups = find_groups(shaver.zoo.build("lenet"), torch.randn(1, 1, 28, 28))
        >>> {name: group.units for name, group in groups.items()}
        {'conv1': 6, 'conv2': 16, 'conv3': 120, 'fc1': 84}
        >>> groups.left_out
        {'fc2': "it makes the model's output"}

    The outputs of each layer are changed, and the layers at whose inputs the changes arrive belong to the group; this
    holds for any code between the layers. A group is returned only if nothing but its units arrives where they are
    read. The model's inputs and the layers that make its output are never in a group; residual streams, to which
    several layers add, only with ``residual=True``.

    Args:
        model: Left as it was: mode, tensors and random state.
        example: Inputs: a tensor, a tuple of positional or a dict of keyword arguments.
        forward: ``forward(model, batch)`` for a batch of another kind, or outputs that are not a tensor.
        residual: Also the channels of residual streams, where they can be removed exactly. They cannot where a
            LayerNorm takes its mean over them.
        seconds: Time limit; the ``TimeoutError`` says where the search stopped.
        kinds: Only these of ``"channels"``, ``"hidden"``, ``"heads"`` and ``"residual"``.

    Returns:
        The groups in the order in which the model calls its layers. ``left_out`` has the other layers, and why.

    Raises:
        ValueError: There are no groups, or ``kinds`` names something else.
        RuntimeError: The example does not run through the model.
        TimeoutError: After ``seconds``.
    """
    if isinstance(kinds, str):
        kinds = [kinds]
    if not isinstance(seconds, int | float) or not seconds >= 0:
        raise ValueError(f"seconds must be a number of at least 0, not {seconds!r}.")
    if kinds is not None and not isinstance(kinds, Collection):
        raise TypeError(f"kinds is a list of {', '.join(get_args(Kind))}, or None, not {kinds!r}.")
    check_flags(residual=residual)
    wanted = {check_name("kind of group", kind, get_args(Kind)) for kind in kinds} if kinds is not None else None
    check_values(model, "find_groups")
    example = check_example(example, forward)
    inner = forward or _forward

    def run(network: nn.Module, batch: Any) -> Tensor:
        return inner(network, copied(batch))  # a network that works in place must not change the inputs

    with evaluating(model):
        batch = _accepted(model, run, example)
        drawn = VariedInputs(model, inner, batch).draws(2) or [batch]
        with Probe(model, lambda given: run(model, given), drawn[0], seconds) as probe:
            arrivals = Arrivals(probe)
            coupling = Coupling(arrivals, residual)
            found, left_out = _assemble(coupling), coupling.left_out
            silent = arrivals.silent([group for _, group in found], drawn[-1])
    for (_, group), fine in zip(found, silent, strict=True):
        if not fine:
            left_out[group.name] = "something else arrives where its units are read"
    places = {layer.name: place for place, layer in enumerate(probe.order)}
    placed = [pair for pair, fine in zip(found, silent, strict=True) if fine]
    placed += [(places[name], group) for name, group in packed_heads(model).items() if name in places]
    groups = _distinct([group for _, group in sorted(placed, key=lambda pair: pair[0])])
    kept = {group.name: group for group in groups if wanted is None or group.kind in wanted}
    if not kept:
        raise ValueError(_nothing(model, left_out, wanted, groups))
    owned = {piece.tensor for group in kept.values() for piece in group.slices}
    return Groups(kept, left_out, {name: probe.tensors[name].shape for name in sorted(owned)})


def _forward(model: nn.Module, batch: Any) -> Tensor:
    result = call(model, batch)
    hidden = getattr(result, "last_hidden_state", None)  # a transformers model without a head
    return hidden if isinstance(hidden, Tensor) else outputs_in(result)


def _accepted(model: nn.Module, run: Forward, example: Any) -> Any:
    """Two samples of the example, or all of it where the model does not take two."""
    for batch in (short(example), example):
        try:
            outputs = run(model, batch)
            if not isinstance(outputs, Tensor):
                raise TypeError(f"forward returned a {type(outputs).__name__} instead of a tensor.")
        except Exception as error:  # whatever the user's model raises
            reason = error
        else:
            return batch
    raise RuntimeError(
        f"the example does not run through {type(model).__name__}: {reason} An example is a tensor, a tuple "
        "of positional or a dict of keyword arguments; forward=lambda model, batch: … covers others."
    ) from reason


def _nothing(model: nn.Module, left_out: Mapping[str, str], wanted: set[str] | None, found: list[Group]) -> str:
    kind = type(model).__name__
    if found:
        others = ", ".join(sorted({group.kind for group in found}))
        return f"{kind} has no groups of kinds={sorted(wanted or ())!r}; it has groups of {others}."
    if not left_out:
        return f"{kind} calls no layer whose channels could be removed (linear layers, convolutions, attention)."
    reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
    return f"{kind} has no units that could be removed. {reasons}."


def _assemble(coupling: Coupling) -> list[tuple[int, Group]]:
    """The groups, each with the place of its first layer in the order of the model's calls.

    Units with the same number of positions in the same tensors are interchangeable and form one group. A layer whose
    channels are all one unit is left out; ``coupling.left_out`` then says so.
    """
    order = coupling.probe.order
    roles = _roles(coupling)
    held: dict[int, dict[Axis, list[int]]] = defaultdict(dict)
    for axis in roles:
        for position, label in enumerate(coupling.labels[coupling.probe.range_of(axis)].tolist()):
            if label >= 0:
                held[label].setdefault(axis, []).append(position)
    alike: dict[tuple[tuple[Axis, int], ...], list[int]] = defaultdict(list)
    for label, unit in held.items():
        alike[tuple((axis, len(positions)) for axis, positions in unit.items())].append(label)

    summed = set(coupling.labels[: len(coupling.arrivals.summed)][coupling.arrivals.summed].tolist())
    found: list[tuple[int, Group]] = []
    grouped: set[str] = set()
    for shape, labels in alike.items():
        layers = [layer for layer in order if layer.sort == "dense" and layer.makes[0] in dict(shape)]
        if len(labels) < 2 or not layers or not any(roles[axis] == "reads" for axis, _ in shape):
            continue
        kind = "residual" if labels[0] in summed else _kind_of(dict(shape), layers, roles, order)
        slices = tuple(
            Slice(axis[0], axis[1], torch.tensor([held[label][axis] for label in labels]), roles[axis])
            for axis, _ in shape
        )
        name = _name_of(layers, dict(shape), kind)
        found.append((order.index(layers[0]), Group(name, kind, len(labels), slices)))
        grouped |= {layer.name for layer in layers}
    for layer in coupling.sources:
        if layer.name not in grouped:
            coupling.left_out.setdefault(layer.name, _MIXED if layer.width > 1 else "it has a single output")
    return found


def _roles(coupling: Coupling) -> dict[Axis, Role]:
    """Axis → role, in the order of calls; a tied weight that makes units in one layer and reads in another makes."""
    roles: dict[Axis, Role] = {}
    for layer in coupling.probe.order:
        roles |= dict.fromkeys(layer.makes, "makes")
        for axis in layer.reads:
            roles.setdefault(axis, "reads")
    return roles | dict.fromkeys(coupling.raw, "makes")


def _kind_of(shape: dict[Axis, int], layers: list[Layer], roles: dict[Axis, Role], order: list[Layer]) -> Kind:
    """The kind of units outside residual streams, from their number of positions on each axis."""
    if any(isinstance(layer.module, nn.modules.conv._ConvNd) for layer in layers):
        return "channels"
    between = {axis for layer in order if layer.sort != "dense" for axis in layer.makes}
    several = any(count > 1 for axis, count in shape.items() if roles[axis] == "makes")
    # A gated unit has two rows and is read in one column; a head has several of both.
    read = any(count > 1 for axis, count in shape.items() if roles[axis] == "reads")
    return "heads" if several and read and not between & set(shape) else "hidden"


def _name_of(layers: list[Layer], axes: Iterable[Axis], kind: Kind) -> str:
    """The layer that makes the units; for several layers, and for heads, the module that contains them all."""
    if (len(layers) == 1 and kind != "heads") or kind == "residual":
        inside = ".out_proj" if isinstance(layers[0].module, nn.MultiheadAttention) else ""
        return layers[0].name + inside
    parts = zip(*(tensor.split(".")[:-1] for tensor, _ in axes), strict=False)
    shared = [names[0] for names in takewhile(lambda names: len(set(names)) == 1, parts)]
    return ".".join(shared) or layers[0].name


def _distinct(groups: list[Group]) -> list[Group]:
    """Number the groups that would have the same name."""
    seen: Counter[str] = Counter()
    result = []
    for group in groups:
        seen[group.name] += 1
        count = seen[group.name]
        result.append(group if count == 1 else replace(group, name=f"{group.name}#{count}"))
    return result
