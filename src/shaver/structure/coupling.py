"""Channels that must go together, from where each of them arrives.

A layer's output channel and every position that reads it are tied together; what is tied, directly or through others,
is one unit. Heads, gates, flattened feature maps, concatenations and grouped queries need no rule of their own: a
query channel arrives at all columns of its head in the output projection, and so do the keys and values.
"""

from collections.abc import Iterable, Mapping
from itertools import zip_longest

import torch
from torch import Tensor

from shaver.structure.arrivals import Arrivals
from shaver.structure.codes import code, decode
from shaver.structure.layers import Axis, Layer
from shaver.structure.probing import Pass, everything

OUTPUT = "it makes the model's output"
RESIDUAL = "its outputs are added to those of other layers (a residual stream); residual=True includes these"
TIED = "it shares a tensor, or a layer that reads it, with what may not be removed"


class Coupling:
    """The units of a model.

    Args:
        arrivals: Of the model.
        residual: Whether channels that several layers add up to are units, too.

    Attributes:
        labels: For every node (position of a dimension) the number of its unit; −1 where it may not be removed.
        left_out: Layer → why its outputs are not units.
        raw: Dimensions of tensors outside the known layers that belong to units.
    """

    def __init__(self, arrivals: Arrivals, residual: bool) -> None:
        self.arrivals = arrivals
        self.probing = probing = arrivals.probing
        self.sources, self.reach = arrivals.sources, arrivals.reach
        self.left_out: dict[str, str] = {}
        self.raw: list[Axis] = []
        self.frozen = torch.zeros(probing.size, dtype=torch.bool)
        self._reached = sum((seen.reached for seen in self.reach.values()), torch.zeros_like(self.frozen))
        self._freeze(residual)
        live = [layer for layer in self.sources if layer.name not in self.left_out]
        edges = [self._own_edges(layer) for layer in self.sources]
        edges += [self._arrival_edges(layer, table) for layer, table in self._tables(live).items()]
        self.labels = components(torch.cat(edges, 1) if edges else torch.zeros(2, 0, dtype=torch.long), probing.size)
        self._forbid(self.labels[self.frozen], TIED)
        for layer in live:
            self._all_read(layer)
            self._evenly_read(layer)
        self._raw_tensors(live)

    def _freeze(self, residual: bool) -> None:
        """Leave out the layers that make the output or a sum, and every layer that arrives where these do."""
        for layer, seen in self.reach.items():
            if seen.output:
                self._leave_out(layer, OUTPUT)
            elif not residual and (seen.reached & self.arrivals.summed).any():
                self._leave_out(layer, RESIDUAL)
            elif not seen.reached.any():
                self._leave_out(layer, "no layer reads what it makes")
        growing = True
        while growing:
            growing = False
            for layer, seen in self.reach.items():
                if layer.name not in self.left_out and (seen.reached & self.frozen).any():
                    self._leave_out(layer, TIED)
                    growing = True

    def _leave_out(self, layer: Layer, reason: str) -> None:
        self.left_out[layer.name] = reason
        self.frozen |= self.reach[layer].reached
        for axis in layer.makes:
            self.frozen[self.probing.range_of(axis)] = True

    def _tables(self, layers: list[Layer]) -> dict[Layer, Tensor]:
        """Layer → (channels, nodes it reaches): where each channel arrives."""
        tables = self._decoded(layers, more=False)
        # Where channels arrive together, another look tells which of them really do.
        unclear = [
            layer for layer, table in tables.items() if (table.sum(0) > 1).any() and code(layer.width, more=True)
        ]
        for layer, table in self._decoded(unclear, more=True).items():
            tables[layer] &= table
        return tables

    def _decoded(self, layers: list[Layer], more: bool) -> dict[Layer, Tensor]:
        """Layers that share no reader are probed at once."""
        tables = {}
        for together in _apart(layers, self.reach):
            digits = {layer: code(layer.width, more=more) for layer in together}
            hits: dict[Layer, list[list[Tensor]]] = {layer: [[] for _ in digits[layer]] for layer in together}
            tests = [[(layer, at, mask) for at, digit in enumerate(digits[layer]) for mask in digit]
                     for layer in together]  # fmt: skip
            for row in zip_longest(*tests):
                now = [test for test in row if test is not None]
                reached = self.probing.spread({layer: mask for layer, _, mask in now}).reached
                for layer, at, _ in now:
                    hits[layer][at].append(reached[self.reach[layer].reached])
            for layer in together:
                tables[layer] = decode(digits[layer], hits[layer])
        return tables

    def _all_read(self, layer: Layer) -> None:
        """Leave a layer out if some of its channels arrive nowhere: perhaps they only do for other data."""
        own = self.labels[self.probing.range_of(layer.makes[0])]
        if not torch.isin(own, self.labels[self.reach[layer].reached]).all():
            self._forbid(own, "some of its outputs do not arrive at any layer")

    def _evenly_read(self, layer: Layer) -> None:
        """Leave a layer out if its channels differ in how often they are read, beside positions nobody arrives at.

        Channels may differ, as where code drops a part of some maps; but then every position is some layer's.
        """
        own = self.labels[self.probing.range_of(layer.makes[0])]
        for reader in self.probing.order:
            for axis in reader.reads:
                here = self.probing.range_of(axis)
                times = torch.unique(self.labels[here][torch.isin(self.labels[here], own)], return_counts=True)[1]
                if len(times.unique()) > 1 and not self._reached[here].all():
                    self._forbid(own, f"its outputs arrive at some positions of {axis[0]!r} unevenly, at others not")

    def _own_edges(self, layer: Layer) -> Tensor:
        """A channel's row in the weight and its bias are one."""
        first, *rest = [torch.arange(self.probing.size)[self.probing.range_of(axis)] for axis in layer.makes]
        return torch.cat([torch.stack([first, first]), *(torch.stack([first, other]) for other in rest)], 1)

    def _arrival_edges(self, layer: Layer, table: Tensor) -> Tensor:
        channel, at = table.nonzero().T
        node = self.reach[layer].reached.nonzero().squeeze(1)[at]
        return torch.stack([channel + self.probing.nodes[layer.makes[0]][0], node])

    def _forbid(self, labels: Tensor, reason: str) -> None:
        """Take units out, and all others of the layers that make them: a layer's channels are found all or none."""
        labels = labels[labels >= 0]
        while len(labels):
            bad = torch.isin(self.labels, labels)
            self.labels[bad] = -1
            rest = []
            for layer in self.sources:
                here = self.probing.range_of(layer.makes[0])
                if bad[here].any():
                    self.left_out.setdefault(layer.name, reason)
                    rest.append(self.labels[here])
            labels = torch.cat(rest) if rest else labels[:0]
            labels = labels[labels >= 0]

    def _raw_tensors(self, live: list[Layer]) -> None:
        """Parameters and buffers outside the known layers: a scale for each channel belongs to the channel's unit."""
        probing = self.probing
        units = torch.zeros(probing.size, dtype=torch.bool)
        for layer in live:
            units |= self.reach[layer].reached
        known = {axis[0] for layer in probing.order for axis in (*layer.makes, *layer.reads)}
        seen: set[int] = set()
        owners: dict[Axis, Tensor] = {}
        for name, tensor in probing.tensors.items():
            if name in known or id(tensor) in seen or tensor.numel() < 2 or not tensor.is_floating_point():
                continue
            seen.add(id(tensor))
            dims = [dim for dim in range(tensor.ndim) if tensor.shape[dim] > 1]
            reached = probing.spread({(name, dims[0]): everything(tensor.shape[dims[0]])}).reached & units
            labels = torch.tensor(sorted(set(self.labels[reached].tolist()) - {-1}))
            if len(labels) > 1:
                owners |= self._match(name, dims, labels)
        for axis, owner in owners.items():
            probing.add_nodes(axis)
            self.labels = torch.cat([self.labels, torch.where(torch.isin(owner, self.labels), owner, -1)])
        self.raw = list(owners)

    def _match(self, name: str, dims: list[int], labels: Tensor) -> dict[Axis, Tensor]:
        """The dimension of a tensor that lies along some units, if it has one, and the unit of each position."""
        probing = self.probing
        for dim in dims:
            size = probing.tensors[name].shape[dim]
            digits = code(size)
            hits = [[probing.spread({(name, dim): mask}).reached for mask in digit] for digit in digits]
            units = self.labels[:, None] == labels[None, :]
            meets = (decode(digits, hits).float() @ units.float()) > 0
            if meets.all():
                continue  # Every position goes to every unit, as a number for the whole layer does.
            if bool((meets.sum(1) == 1).all()):
                return {(name, dim): labels[meets.float().argmax(1)]}
            self._forbid(labels, f"dimension {dim} of {name!r} lies along its outputs, but not one to one")
            break
        return {}


def components(edges: Tensor, nodes: int) -> Tensor:
    """The number of the connected component of every node, which is the smallest node in it."""
    labels = torch.arange(nodes)
    while True:
        smaller = torch.minimum(labels[edges[0]], labels[edges[1]])
        new = labels.scatter_reduce(0, edges[0], smaller, "amin").scatter_reduce(0, edges[1], smaller, "amin")
        new = new[new]
        if torch.equal(new, labels):
            return labels
        labels = new


def _apart(layers: Iterable[Layer], reach: Mapping[Layer, Pass]) -> list[list[Layer]]:
    """Layers in sets within which no two arrive at the same node."""
    sets: list[tuple[list[Layer], Tensor]] = []
    for layer in layers:
        mine = reach[layer].reached
        for members, taken in sets:
            if not (taken & mine).any():
                members.append(layer)
                taken |= mine
                break
        else:
            sets.append(([layer], mine.clone()))
    return [members for members, _ in sets]
