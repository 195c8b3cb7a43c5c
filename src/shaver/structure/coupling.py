"""Channels that must be removed together, found from where each of them arrives.

An output channel of a layer and every position that reads it are tied; what is tied, directly or through others, is
one unit. Heads, gates, flattened feature maps, concatenations and grouped queries need no rule of their own: a query
channel arrives at all columns of its head in the output projection, and so do the keys and values.
"""

import torch
from torch import Tensor

from shaver.structure.arrivals import Arrivals, code, decode
from shaver.structure.layers import Axis, Layer
from shaver.structure.probe import everything

OUTPUT = "it makes the model's output"
ROUTES = "the model's code depends on its values (routing, selection)"
RESIDUAL = "its outputs are added to those of other layers (a residual stream); residual=True includes these"
TIED = "it shares a tensor, or a layer that reads it, with what may not be removed"


class Coupling:
    """The units of a model; with ``residual``, channels that several layers add up to are units, too."""

    def __init__(self, arrivals: Arrivals, residual: bool) -> None:
        self.arrivals = arrivals
        self.probe = probe = arrivals.probe
        self.sources, self.reach = arrivals.sources, arrivals.reach
        self.left_out = dict(probe.left_out)  # layer → why its outputs are not units
        self.raw: list[Axis] = []  # dimensions of tensors outside the known layers that belong to units
        self.frozen = torch.zeros(probe.size, dtype=torch.bool)
        self._reached = sum((seen.reached for seen in self.reach.values()), torch.zeros_like(self.frozen))
        self._freeze(residual)
        live = [layer for layer in self.sources if layer.name not in self.left_out]
        edges = [self._own_edges(layer) for layer in self.sources]
        edges += [self._arrival_edges(layer, table) for layer, table in arrivals.tables(live).items()]
        # for every node (position of a dimension) the number of its unit, or −1 where it must stay
        self.labels = components(torch.cat(edges, 1) if edges else torch.zeros(2, 0, dtype=torch.long), probe.size)
        self._forbid(self.labels[self.frozen], TIED)
        for layer in live:
            self._check_readers(layer)
        self._raw_tensors(live)

    def _freeze(self, residual: bool) -> None:
        """Leave out the layers that make the output or a sum, and every layer that arrives where these do."""
        for layer, seen in self.reach.items():
            if seen.failed:
                self._leave_out(layer, ROUTES)
            elif seen.output:
                self._leave_out(layer, OUTPUT)
            elif not residual and (seen.reached & self.arrivals.summed).any():
                self._leave_out(layer, RESIDUAL)
            elif not seen.reached.any():
                self._leave_out(layer, "no layer reads what it makes")
        while tied := [
            layer
            for layer, seen in self.reach.items()
            if layer.name not in self.left_out and (seen.reached & self.frozen).any()
        ]:
            for layer in tied:
                self._leave_out(layer, TIED)

    def _leave_out(self, layer: Layer, reason: str) -> None:
        self.left_out[layer.name] = reason
        self.frozen |= self.reach[layer].reached
        for axis in layer.makes:
            self.frozen[self.probe.range_of(axis)] = True

    def _check_readers(self, layer: Layer) -> None:
        """Leave a layer out if some of its channels arrive nowhere (they may for other data), or unevenly.

        Channels may be read unevenly, as where code drops a part of some maps; but then every position of the reader
        must belong to some layer.
        """
        own = self.labels[self.probe.range_of(layer.makes[0])]
        if not torch.isin(own, self.labels[self.reach[layer].reached]).all():
            self._forbid(own, "some of its outputs do not arrive at any layer")
        own = self.labels[self.probe.range_of(layer.makes[0])]
        for reader in self.probe.order:
            for axis in reader.reads:
                here = self.probe.range_of(axis)
                times = torch.unique(self.labels[here][torch.isin(self.labels[here], own)], return_counts=True)[1]
                if len(times.unique()) > 1 and not self._reached[here].all():
                    self._forbid(own, f"its outputs arrive at some positions of {axis[0]!r} unevenly, at others not")

    def _own_edges(self, layer: Layer) -> Tensor:
        """Tie a channel's row in the weight to its bias."""
        first, *rest = [torch.arange(self.probe.size)[self.probe.range_of(axis)] for axis in layer.makes]
        return torch.cat([torch.stack([first, first]), *(torch.stack([first, other]) for other in rest)], 1)

    def _arrival_edges(self, layer: Layer, table: Tensor) -> Tensor:
        channel, at = table.nonzero().T
        node = self.reach[layer].reached.nonzero().squeeze(1)[at]
        return torch.stack([channel + self.probe.nodes[layer.makes[0]][0], node])

    def _forbid(self, labels: Tensor, reason: str) -> None:
        """Take units out, with all other units of their layers: all channels of a layer are in groups, or none."""
        labels = labels[labels >= 0]
        while len(labels):
            bad = torch.isin(self.labels, labels)
            self.labels[bad] = -1
            rest = []
            for layer in self.sources:
                here = self.probe.range_of(layer.makes[0])
                if bad[here].any():
                    self.left_out.setdefault(layer.name, reason)
                    rest.append(self.labels[here])
            labels = torch.cat(rest) if rest else labels[:0]
            labels = labels[labels >= 0]

    def _raw_tensors(self, live: list[Layer]) -> None:
        """Parameters and buffers outside the known layers: a scale for each channel belongs to the channel's unit."""
        probe = self.probe
        units = torch.zeros(probe.size, dtype=torch.bool)
        for layer in live:
            units |= self.reach[layer].reached
        known = {axis[0] for layer in probe.order for axis in (*layer.makes, *layer.reads)}
        seen: set[int] = set()
        owners: dict[Axis, Tensor] = {}
        for name, tensor in probe.tensors.items():
            if name in known or id(tensor) in seen or tensor.numel() < 2 or not tensor.is_floating_point():
                continue
            seen.add(id(tensor))
            dims = [dim for dim in range(tensor.ndim) if tensor.shape[dim] > 1]
            reached = probe.spread({(name, dims[0]): everything(tensor.shape[dims[0]])}).reached & units
            labels = torch.tensor(sorted(set(self.labels[reached].tolist()) - {-1}))
            if len(labels) > 1:
                owners |= self._match(name, dims, labels)
        for axis, owner in owners.items():
            probe.add_nodes(axis)
            self.labels = torch.cat([self.labels, torch.where(torch.isin(owner, self.labels), owner, -1)])
        self.raw = list(owners)

    def _match(self, name: str, dims: list[int], labels: Tensor) -> dict[Axis, Tensor]:
        """The dimension of a tensor that lies along some units, if it has one, and the unit of each position."""
        probe = self.probe
        for dim in dims:
            size = probe.tensors[name].shape[dim]
            digits = code(size)
            hits = [[probe.spread({(name, dim): mask}).reached for mask in digit] for digit in digits]
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
