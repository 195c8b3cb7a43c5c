"""Where the output channels of each layer arrive, and where several layers are added up.

Which of n channels arrive at a position is found with about 2 log₂ n forward passes instead of n: each pass changes
the channels whose number has a certain digit, and the answers together give the channel's number.
"""

import math
from collections.abc import Iterable, Sequence
from itertools import zip_longest

import torch
from torch import Tensor

from shaver.structure.groups import Group
from shaver.structure.layers import Axis, Layer
from shaver.structure.probe import Change, Probe, everything


class Arrivals:
    """The layers that make channels, and the nodes (positions of dimensions) they reach."""

    def __init__(self, probe: Probe) -> None:
        self.probe = probe
        self.sources = [layer for layer in probe.order if layer.sort == "dense"]  # in the order of calls
        self.reach = {layer: probe.reach(layer) for layer in self.sources}
        #: Layers whose outputs can change without the model failing; the others route or select.
        self.free = [layer for layer, seen in self.reach.items() if not seen.failed]
        self.summed = self._sums()  # for every node, whether several layers are added up there

    def tables(self, layers: list[Layer]) -> dict[Layer, Tensor]:
        """Layer → (channels, nodes it reaches): where each channel arrives."""
        tables = self._decoded(layers, more=False)
        # Where several channels seem to arrive at one node, a longer code tells which of them do.
        several = [layer for layer, table in tables.items() if (table.sum(0) > 1).any()]
        unclear = [layer for layer in several if code(layer.width, more=True)]
        for layer, table in self._decoded(unclear, more=True).items():
            tables[layer] &= table
        return tables

    def _decoded(self, layers: list[Layer], more: bool) -> dict[Layer, Tensor]:
        tables = {}
        for together in self._apart(layers):
            digits = {layer: code(layer.width, more=more) for layer in together}
            hits: dict[Layer, list[list[Tensor]]] = {layer: [[] for _ in digits[layer]] for layer in together}
            tests = [[(layer, at, mask) for at, digit in enumerate(digits[layer]) for mask in digit]
                     for layer in together]  # fmt: skip
            for row in zip_longest(*tests):
                now = [test for test in row if test is not None]
                reached = self.probe.spread({layer: mask for layer, _, mask in now}).reached
                for layer, at, _ in now:
                    hits[layer][at].append(reached[self.reach[layer].reached])
            for layer in together:
                tables[layer] = decode(digits[layer], hits[layer])
        return tables

    def _apart(self, layers: Iterable[Layer]) -> list[list[Layer]]:
        """Sets of layers that share no reader, so that each set can be probed at once."""
        sets: list[tuple[list[Layer], Tensor]] = []
        for layer in layers:
            mine = self.reach[layer].reached
            for members, taken in sets:
                if not (taken & mine).any():
                    members.append(layer)
                    taken |= mine
                    break
            else:
                sets.append(([layer], mine.clone()))
        return [members for members, _ in sets]

    def _sums(self) -> Tensor:
        """Nodes that several layers reach, none of which can silence them alone: a sum, not a product."""
        probe = self.probe
        several = sum((seen.reached.int() for seen in self.reach.values()), torch.zeros(probe.size).int()) > 1
        silenced = torch.zeros(probe.size, dtype=torch.bool)
        after = [axis for layer in probe.order if layer.sort != "dense" for axis in layer.makes]
        for layer in self.sources:
            here = self.reach[layer].reached
            if not (here & several).any():
                continue
            mute = [Change(layer, everything(layer.width), "zero")]
            # A norm or grouped convolution that follows only this layer would still send its shift.
            alone = here & ~several
            behind = [axis for axis in after if alone[probe.range_of(axis)].all()]
            mute += [Change(axis, everything(probe.nodes[axis][1]), "zero") for axis in behind]
            moved = self._moved(mute, [other for other in self.free if other is not layer])
            if moved is not None:
                silenced |= here & ~moved
        return several & ~silenced

    def _moved(self, mute: list[Change], others: list[Layer], batch: object = None) -> Tensor | None:
        """The nodes that inputs and other layers still change while some units are zero; None if the model fails."""
        quiet = self.probe.run(mute, real=True, keep=True)
        if quiet.failed:
            return None
        sway = [Change(layer, everything(layer.width), "sway") for layer in others]
        return self.probe.turns([*mute, *sway], reference=quiet, batch=batch, real=True).reached

    def silent(self, groups: list[Group], batch: object) -> list[bool]:
        """For each group, whether its units are silent when they are zero, whatever inputs and other layers do."""
        makes: dict[Axis, Tensor] = {}
        for piece in (piece for group in groups for piece in group.slices if piece.role == "makes"):
            axis = (piece.tensor, piece.dim)
            mask = makes.setdefault(axis, torch.zeros(self.probe.nodes[axis][1], dtype=torch.bool))
            mask[piece.index.flatten()] = True
        # A layer that answers from memory is silenced at its output.
        at_layers = {axis for layer in self.sources for axis in layer.makes}
        mute = [Change(axis, mask, "zero") for axis, mask in makes.items() if axis not in at_layers]
        mute += [Change(layer, makes[layer.makes[0]], "zero") for layer in self.sources if layer.makes[0] in makes]
        moved = self._moved(mute, [layer for layer in self.free if layer.makes[0] not in makes], batch)
        if moved is None:
            return [False] * len(groups)
        return [
            not any(
                moved[self.probe.range_of((piece.tensor, piece.dim))][piece.index].any()
                for piece in group.slices
                if piece.role == "reads"
            )
            for group in groups
        ]


def code(channels: int, *, more: bool = False) -> list[list[Tensor]]:
    """The digits of the channel numbers: for each digit, one mask per value.

    The radices are the prime factors of ``channels``. Channels in even blocks, such as those of a head, share some
    digits and take all values of the others if the size of the block is a product of the first radices; so the factors
    are used in several orders. Numbers with a large prime factor are written in binary. ``more`` gives only the further
    orders with which every divisor of ``channels`` is the size of a block.

    Example:
        >>> [[mask.int().tolist() for mask in digit] for digit in code(4)]
        [[[1, 0, 1, 0], [0, 1, 0, 1]], [[1, 1, 0, 0], [0, 0, 1, 1]]]
    """
    factors = _factors(channels)
    orders = [tuple(factors), tuple(reversed(factors))]
    if factors and factors[-1] > 64:
        orders = [] if more else [(2,) * math.ceil(math.log2(channels))]
    elif more:
        orders = [order for order in _chains(channels) if order not in orders]
    digits = []
    for order in dict.fromkeys(orders):
        rest = torch.arange(channels)
        for radix in order:
            digits.append([rest % radix == value for value in range(radix)])
            rest = rest // radix
    return digits if digits or more else [[torch.ones(channels, dtype=torch.bool)]]


def decode(digits: Sequence[Sequence[Tensor]], hits: Sequence[Sequence[Tensor]]) -> Tensor:
    """``(channels, positions)``: which channels may arrive at which positions.

    ``digits`` come from :func:`code`; ``hits`` has, for every mask in them, the positions that were reached when its
    channels were changed. The result is exact for positions that are reached by one channel, by an even block whose
    size the code knows, or by all. For other sets of channels it may contain more channels, never fewer.
    """
    # Positions with the same answers, such as the tensors of one norm, are decoded once.
    answers = torch.stack([hit for reached in hits for hit in reached])
    distinct, which = torch.unique(answers.to(torch.uint8), dim=1, return_inverse=True)
    rows = iter(distinct.bool())
    possible = torch.ones(len(digits[0][0]), distinct.shape[1], dtype=torch.bool)
    for masks in digits:
        here = torch.zeros_like(possible)
        for mask in masks:
            here |= mask[:, None] & next(rows)[None, :]
        possible &= here
    return possible[:, which]


def _factors(number: int) -> list[int]:
    factors, prime = [], 2
    while prime * prime <= number:
        if number % prime:
            prime += 1
        else:
            factors.append(prime)
            number //= prime
    return [*factors, number] if number > 1 else factors


def _chains(number: int) -> list[tuple[int, ...]]:
    """Orders of the prime factors whose partial products contain every divisor."""
    orders: list[tuple[int, ...]] = []
    covered: set[int] = set()
    for divisor in range(1, number + 1):
        if number % divisor == 0 and divisor not in covered:
            order = (*_factors(divisor), *_factors(number // divisor))
            covered.update(math.prod(order[:end]) for end in range(len(order) + 1))
            orders.append(order)
    return orders
