"""A layer as a matrix product: its weight as rows of a matrix, its inputs as rows that the matrix multiplies.

Every layer with a view computes ``Y = X Wᵀ + b`` for each of its groups: X has one row per sample (and position), W one
row per output. A convolution's X holds the patches under its kernel. A transposed convolution is an ordinary one of the
input with zeros between its entries and the kernel flipped.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.criteria.prunable_weights import is_transposed_linear

CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def has_view(module: nn.Module) -> bool:
    """Whether the layer's weight can be seen as a matrix here."""
    return isinstance(module, (nn.Linear, *CONVOLUTIONS, *TRANSPOSED)) or is_transposed_linear(module)


def groups_of(module: nn.Module) -> int:
    """The number of groups of a convolution; 1 for other layers."""
    groups: int = getattr(module, "groups", 1)
    return groups


def matrix_of(module: nn.Module, weight: Tensor) -> Tensor:
    """The weight, or a tensor of its shape, as ``(groups, outputs, inputs)``, both counted within a group."""
    groups = groups_of(module)
    if is_transposed_linear(module):
        return weight.t().unsqueeze(0)
    if isinstance(module, TRANSPOSED):
        split = weight.reshape(groups, -1, *weight.shape[1:]).transpose(1, 2)
        return split.flip(tuple(range(3, split.ndim))).flatten(3).flatten(2)
    return weight.reshape(groups, weight.shape[0] // groups, -1)


def weight_of(module: nn.Module, matrix: Tensor, shape: torch.Size) -> Tensor:
    """The inverse of :func:`matrix_of`: a tensor of the weight's shape."""
    groups = groups_of(module)
    if is_transposed_linear(module):
        return matrix[0].t()
    if isinstance(module, TRANSPOSED):
        split = matrix.reshape(groups, shape[1], shape[0] // groups, *shape[2:])
        return split.flip(tuple(range(3, split.ndim))).transpose(1, 2).reshape(shape)
    return matrix.reshape(shape)


def input_rows(module: nn.Module, x: Tensor, thin: int = 1, offset: int = 0) -> Tensor:
    """The layer's inputs x as ``(groups, rows, inputs)``.

    Of a convolution's output positions, every ``thin``-th along each dimension is taken, from ``offset`` on.
    """
    if isinstance(module, CONVOLUTIONS):
        return _patches(module, _padded(module, x), module.stride, thin, offset)
    if isinstance(module, TRANSPOSED):
        return _patches(module, _spread(module, x), (1,) * len(module.stride), thin, offset)
    return x.reshape(1, -1, x.shape[-1])


def output_rows(module: nn.Module, y: Tensor, thin: int = 1, offset: int = 0) -> Tensor:
    """The layer's outputs as ``(groups, rows, outputs)``, row for row those of :func:`input_rows`."""
    if isinstance(module, CONVOLUTIONS + TRANSPOSED):
        dims = len(module.stride)
        y = y.unsqueeze(0) if y.ndim == dims + 1 else y
        for dim in range(2, dims + 2):
            y = y[(slice(None),) * dim + (slice(offset, None, thin),)]
        split = y.reshape(len(y), module.groups, -1, *y.shape[2:])  # (batch, groups, outputs, positions …)
        return split.flatten(3).permute(1, 0, 3, 2).flatten(1, 2)
    return y.reshape(1, -1, y.shape[-1])


def _padded(conv: Any, x: Tensor) -> Tensor:
    x = x.unsqueeze(0) if x.ndim == len(conv.stride) + 1 else x
    mode = "constant" if conv.padding_mode == "zeros" else conv.padding_mode
    around = conv._reversed_padding_repeated_twice
    return F.pad(x, around, mode=mode) if any(around) else x


def _spread(conv: Any, x: Tensor) -> Tensor:
    """The input of a transposed convolution, spread out so that an ordinary one of stride 1 gives the same."""
    dims = len(conv.stride)
    x = x.unsqueeze(0) if x.ndim == dims + 1 else x
    sizes = [(size - 1) * stride + 1 for size, stride in zip(x.shape[2:], conv.stride, strict=True)]
    wide = x.new_zeros(*x.shape[:2], *sizes)
    wide[(slice(None), slice(None), *(slice(None, None, stride) for stride in conv.stride))] = x
    around = []
    for dim in reversed(range(dims)):
        reach = conv.dilation[dim] * (conv.kernel_size[dim] - 1) - conv.padding[dim]
        around += [reach, reach + conv.output_padding[dim]]
    return F.pad(wide, around)


def _patches(conv: Any, x: Tensor, stride: tuple[int, ...], thin: int, offset: int) -> Tensor:
    dims = len(stride)
    for dim in range(dims):
        reach = conv.dilation[dim] * (conv.kernel_size[dim] - 1) + 1
        x = x[(slice(None),) * (dim + 2) + (slice(offset * stride[dim], None),)]
        x = x.unfold(dim + 2, reach, thin * stride[dim])[..., :: conv.dilation[dim]]
    # (batch, channels, positions …, kernel …) → (groups, batch, positions …, channels of the group, kernel …)
    x = x.reshape(len(x), conv.groups, -1, *x.shape[2:])
    order = (1, 0, *range(3, 3 + dims), 2, *range(3 + dims, 3 + 2 * dims))
    return x.permute(order).flatten(2 + dims).flatten(1, 1 + dims)
