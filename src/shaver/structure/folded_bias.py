"""The constants that removed units leave behind, folded into the bias of the layer that reads them.

A unit whose weights are zero can still give a constant c: its bias, a BatchNorm's shift, an activation that is not zero
at zero. A layer that reads it with weights w adds w · c to its outputs everywhere, as a bias does.
"""

import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shaver.criteria.prunable_weights import is_transposed_linear
from shaver.structure.groups import Groups
from shaver.structure.record import output_dim

_Convolution, _Transposed = nn.modules.conv._ConvNd, nn.modules.conv._ConvTransposeNd


@dataclass
class RemovedInputs:
    """The inputs of a layer that come from removed units, and the range of their values."""

    name: str  # qualified name of the layer
    group: str  # the group whose units it reads
    layer: nn.Module
    positions: Tensor  # of the removed units along the weight's input dimension
    least: Tensor | None = None  # the smallest value at each removed input, over samples and positions
    most: Tensor | None = None  # the largest
    values: int = 0  # the number of values at each

    @property
    def blocks(self) -> int:
        """Groups of a convolution: its weight counts the inputs within each of them."""
        layer = self.layer
        return layer.groups if isinstance(layer, _Convolution) and not isinstance(layer, _Transposed) else 1

    def see(self, inputs: Tensor) -> None:
        """Extend the range by the inputs of one call."""
        feature = -1
        if isinstance(self.layer, _Convolution):
            feature = 1 if inputs.ndim == self.layer.weight.ndim else 0  # 0: one sample without a batch dimension
        starts = torch.arange(self.blocks).unsqueeze(1) * (inputs.shape[feature] // self.blocks)
        channels = (starts + self.positions).reshape(-1)
        part = inputs.detach().index_select(feature, channels.to(inputs.device)).movedim(feature, -1)
        part = part.reshape(-1, len(channels))
        least, most = part.amin(0), part.amax(0)
        self.least = least if self.least is None else torch.minimum(self.least, least)
        self.most = most if self.most is None else torch.maximum(self.most, most)
        self.values += len(part)

    def weights(self) -> Tensor:
        """The weights with which the removed units are read, ``(outputs, removed, kernel positions)``."""
        weight = self.layer.weight
        assert isinstance(weight, Tensor)
        part = weight.detach().index_select(1 - output_dim(self.layer), self.positions.to(weight.device))
        if output_dim(self.layer):
            part = part.transpose(0, 1)
        return part.reshape(part.shape[0], part.shape[1], -1)

    def constant(self, tolerance: float) -> Tensor | None:
        """What the removed units add to each output, in double precision; None where that is nothing.

        Raises:
            ValueError: It is not constant, or a bias cannot take it up.
        """
        if self.least is None or self.most is None:
            return None  # not called as a module: the comparison of outputs decides
        weights = self.weights().double()
        heard = weights.abs().amax((0, 2)) > 0
        if not bool(heard.any()):
            return None
        least, most = (t.double().reshape(self.blocks, -1)[:, heard] for t in (self.least, self.most))
        size = torch.maximum(least.abs(), most.abs())
        if float(size.max()) == 0:
            return None
        if bool((most - least > tolerance * size).any()):
            raise ValueError(
                f"what {self.name!r} reads of the removed units of group {self.group!r} varies with the input (from "
                f"{float(least.min()):.3g} to {float(most.max()):.3g}), so they are not masked; mask=True masks them."
            )
        self._check_foldable()
        by_output = ((least + most) / 2).repeat_interleave(len(weights) // self.blocks, 0)  # (outputs, heard)
        return (weights[:, heard].sum(2) * by_output).sum(1)

    def _check_foldable(self) -> None:
        what = f"the removed units of group {self.group!r} give {self.name!r} a constant that is not zero"
        if self.values < 2:
            raise ValueError(f"{what}, as far as one sample shows; pass an example with two samples or more.")
        if isinstance(self.layer, _Transposed):
            raise ValueError(
                f"{what}, and a transposed convolution does not spread it evenly; mask=True leaves it out."
            )
        if not isinstance(self.layer, _Convolution) or self.layer.padding_mode != "zeros":
            return
        padding = self.layer.padding
        if padding == "same":
            padding = tuple(size - 1 for size in self.layer.kernel_size)
        if padding != "valid" and any(padding):
            raise ValueError(
                f"{what}, and its zero padding makes that another constant at the border, which no bias can give; "
                "mask=True leaves the constant out, padding_mode='replicate' would make it foldable."
            )


def readers_of(model: nn.Module, groups: Groups, kept: Mapping[str, Tensor]) -> list[RemovedInputs]:
    """The layers that read removed units through a weight whose input dimension is known."""
    found = []
    for name, keep in kept.items():
        for piece in groups[name].slices:
            owner, _, own = piece.tensor.rpartition(".")
            if piece.role != "reads" or own != "weight":
                continue
            layer = model.get_submodule(owner)
            known = isinstance(layer, nn.Linear | _Convolution) or is_transposed_linear(layer)
            if known and piece.dim == 1 - output_dim(layer):
                found.append(RemovedInputs(owner, name, layer, piece.index[~keep.cpu()].reshape(-1)))
    return found


@contextmanager
def recording(readers: list[RemovedInputs]) -> Iterator[None]:
    """Inside the block, the readers record what their layers receive."""

    def see(reader: RemovedInputs, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        reader.see(args[0] if args else next(iter(kwargs.values())))

    with ExitStack() as hooks:
        for reader in readers:
            hooks.callback(reader.layer.register_forward_pre_hook(partial(see, reader), with_kwargs=True).remove)
        yield


def folded_biases(readers: list[RemovedInputs], tolerance: float) -> dict[str, Tensor]:
    """Bias name → its new values, of the layer's full width, for the readers that receive a constant."""
    added: dict[str, Tensor] = {}
    layers: dict[str, Any] = {}
    for reader in readers:
        constant = reader.constant(tolerance)
        if constant is not None and math.isfinite(float(constant.sum())):
            name = f"{reader.name}.bias".removeprefix(".")
            added[name] = added[name] + constant if name in added else constant
            layers[name] = reader.layer
    for name, constant in added.items():
        old = layers[name].bias
        whole = constant if old is None else constant + old.detach().double()
        added[name] = whole.to(layers[name].weight.dtype)
    return added
