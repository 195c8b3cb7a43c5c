"""Where the outputs of each layer arrive, and whether several of them are added up there."""

import torch
from torch import Tensor

from shaver.structure.groups import Group
from shaver.structure.layers import Axis
from shaver.structure.probing import Change, Probing, everything


class Arrivals:
    """The layers that make channels, and the nodes they reach.

    Args:
        probing: The model, entered.

    Attributes:
        sources: Layers whose every output depends on every input, in the order of calls.
        reach: Layer → the nodes (positions of dimensions) that its outputs reach, and whether they are the model's.
        summed: For every node, whether several layers add up there.
    """

    def __init__(self, probing: Probing) -> None:
        self.probing = probing
        self.sources = [layer for layer in probing.order if layer.sort == "dense"]
        self.reach = {layer: probing.reach(layer) for layer in self.sources}
        self.summed = self._sums()

    def _sums(self) -> Tensor:
        """Nodes that several layers reach, none of which can silence them alone: a sum, not a product."""
        probing = self.probing
        several = sum((seen.reached.int() for seen in self.reach.values()), torch.zeros(probing.size).int()) > 1
        silenced = torch.zeros(probing.size, dtype=torch.bool)
        for layer in self.sources:
            here = self.reach[layer].reached
            if not (here & several).any():
                continue
            mute = [Change(layer, everything(layer.width), "zero")]
            # A norm or grouped convolution behind this layer alone would send its shift in the layer's place.
            mute += [Change(axis, everything(size), "zero") for axis, size in self._behind(here & ~several)]
            quiet = probing.run(mute, real=True, keep=True)
            others = [Change(other, everything(other.width), "sway") for other in self.sources if other is not layer]
            moved = probing.turns([*mute, *others], reference=quiet, real=True).reached
            silenced |= here & ~moved
        return several & ~silenced

    def _behind(self, nodes: Tensor) -> list[tuple[Axis, int]]:
        axes = []
        for layer in self.probing.order:
            for axis in layer.makes if layer.sort != "dense" else ():
                if nodes[self.probing.range_of(axis)].all():
                    axes.append((axis, self.probing.nodes[axis][1]))
        return axes

    def silent(self, groups: list[Group], batch: object) -> list[bool]:
        """For each group, whether its units are silent when they are zero, whatever inputs and other layers do.

        Args:
            groups: Of the model.
            batch: Other inputs than those of the clean pass.
        """
        makes: dict[Axis, Tensor] = {}
        for piece in (piece for group in groups for piece in group.slices if piece.role == "makes"):
            axis = (piece.tensor, piece.dim)
            mask = makes.setdefault(axis, torch.zeros(self.probing.nodes[axis][1], dtype=torch.bool))
            mask[piece.index.flatten()] = True
        # The tensors of layers that answer from memory are silenced at the layer's output.
        at_layers = {axis for layer in self.sources for axis in layer.makes}
        mute = [Change(axis, mask, "zero") for axis, mask in makes.items() if axis not in at_layers]
        others = []
        for layer in self.sources:
            if layer.makes[0] in makes:
                mute.append(Change(layer, makes[layer.makes[0]], "zero"))
            else:
                others.append(Change(layer, everything(layer.width), "sway"))
        quiet = self.probing.run(mute, real=True, keep=True)
        moved = self.probing.turns([*mute, *others], reference=quiet, batch=batch, real=True).reached
        return [
            not any(
                moved[self.probing.range_of((piece.tensor, piece.dim))][piece.index].any()
                for piece in group.slices
                if piece.role == "reads"
            )
            for group in groups
        ]
