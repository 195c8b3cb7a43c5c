"""Positions that stay when part of a network is removed, and the slices of tensors that belong to them."""

from collections.abc import Mapping

import torch
from torch import Tensor

#: Dimension → the positions along it that stay, in ascending order.
Dims = Mapping[int, Tensor]
#: Tensor name → what stays of it; tensors that are absent stay whole.
Selection = Mapping[str, Dims]


def take(tensor: Tensor, dims: Dims | None) -> Tensor:
    """The part of a tensor that stays, a copy in the same memory format; the tensor itself where nothing goes.

    Example:
        >>> take(torch.arange(6).reshape(2, 3), {1: torch.tensor([0, 2])})
        tensor([[0, 2],
                [3, 5]])
    """
    if not dims:
        return tensor
    last = tensor.ndim == 4 and not tensor.is_contiguous() and tensor.is_contiguous(memory_format=torch.channels_last)
    for dim, positions in dims.items():
        tensor = tensor.index_select(dim, positions.to(tensor.device))
    return tensor.contiguous(memory_format=torch.channels_last) if last else tensor
