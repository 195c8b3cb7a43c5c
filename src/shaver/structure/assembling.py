"""Groups of like units, from the numbers of the units to which the positions of all tensors belong."""

from collections import Counter, defaultdict
from collections.abc import Iterable

import torch
from torch import nn

from shaver.structure.coupling import Coupling
from shaver.structure.groups import Group, Kind, Role, Slice
from shaver.structure.layers import Axis, Layer

MIXED = "its outputs are mixed with one another before a layer reads them, so none can go alone"


def assemble(coupling: Coupling) -> list[tuple[int, Group]]:
    """The groups, each with the place of its first layer in the order of the model's calls.

    Units with the same number of positions in the same tensors are interchangeable and form one group. A layer whose
    channels are all one unit is left out, which is noted in ``coupling.left_out``.
    """
    order = coupling.probing.order
    roles = _roles(coupling)
    held: dict[int, dict[Axis, list[int]]] = defaultdict(dict)
    for axis in roles:
        for position, label in enumerate(coupling.labels[coupling.probing.range_of(axis)].tolist()):
            if label >= 0:
                held[label].setdefault(axis, []).append(position)
    alike: dict[tuple[tuple[Axis, int], ...], list[int]] = defaultdict(list)
    for label, unit in held.items():
        alike[tuple((axis, len(positions)) for axis, positions in unit.items())].append(label)

    summed = set(coupling.labels[: len(coupling.arrivals.summed)][coupling.arrivals.summed].tolist())
    found: list[tuple[int, Group]] = []
    grouped: set[str] = set()
    for shape, labels in alike.items():
        layers = makers(order, {axis for axis, _ in shape})
        if len(labels) < 2 or not layers or not any(roles[axis] == "reads" for axis, _ in shape):
            continue
        kind = "residual" if labels[0] in summed else kind_of(dict(shape), layers, roles, order)
        slices = tuple(
            Slice(axis[0], axis[1], torch.tensor([held[label][axis] for label in labels]), roles[axis])
            for axis, _ in shape
        )
        name = name_of(layers, dict(shape), kind)
        found.append((order.index(layers[0]), Group(name, kind, len(labels), slices)))
        grouped |= {layer.name for layer in layers}
    for layer in coupling.sources:
        if layer.name not in grouped:
            coupling.left_out.setdefault(layer.name, MIXED if layer.width > 1 else "it has a single output")
    return found


def _roles(coupling: Coupling) -> dict[Axis, Role]:
    """Axis → role, in the order of calls; a tied weight that one layer makes with and another reads with makes."""
    roles: dict[Axis, Role] = {}
    for layer in coupling.probing.order:
        roles |= dict.fromkeys(layer.makes, "makes")
        for axis in layer.reads:
            roles.setdefault(axis, "reads")
    return roles | dict.fromkeys(coupling.raw, "makes")


def makers(order: list[Layer], axes: set[Axis]) -> list[Layer]:
    """The layers whose outputs the units are."""
    return [layer for layer in order if layer.sort == "dense" and layer.makes[0] in axes]


def kind_of(shape: dict[Axis, int], layers: list[Layer], roles: dict[Axis, Role], order: list[Layer]) -> Kind:
    """What units with so many positions on each axis are, if they are not those of a residual stream."""
    if any(layer.convolution for layer in layers):
        return "channels"
    between = {axis for layer in order if layer.sort != "dense" for axis in layer.makes}
    several = any(count > 1 for axis, count in shape.items() if roles[axis] == "makes")
    # A gated unit has two rows and is read in one column; a head has several of both.
    read = any(count > 1 for axis, count in shape.items() if roles[axis] == "reads")
    return "heads" if several and read and not between & set(shape) else "hidden"


def name_of(layers: list[Layer], axes: Iterable[Axis], kind: Kind) -> str:
    """The layer that makes the units; for several layers, and for heads, the module that holds all of it."""
    if (len(layers) == 1 and kind != "heads") or kind == "residual":
        inside = ".out_proj" if isinstance(layers[0].module, nn.MultiheadAttention) else ""
        return layers[0].name + inside
    parts = [tensor.split(".")[:-1] for tensor, _ in axes]
    shared = []
    for names in zip(*parts, strict=False):
        if len(set(names)) > 1:
            break
        shared.append(names[0])
    return ".".join(shared) or layers[0].name


def distinct(found: list[tuple[int, Group]]) -> list[tuple[int, Group]]:
    """Number the groups that would have the same name."""
    seen: Counter[str] = Counter()
    result = []
    for place, group in found:
        seen[group.name] += 1
        name = group.name if seen[group.name] == 1 else f"{group.name}#{seen[group.name]}"
        result.append((place, Group(name, group.kind, group.units, group.slices)))
    return result
