"""The positions that are kept when part of a network is removed, and the matching slices of tensors."""

from collections.abc import Mapping

import torch
from torch import Tensor

#: Dimension → the kept positions along it, in ascending order.
Dims = Mapping[int, Tensor]
#: Tensor name → what is kept of it; tensors that are absent are kept whole.
Selection = Mapping[str, Dims]


def take(tensor: Tensor, dims: Dims | None) -> Tensor:
    """The kept part of a tensor: a copy in the same memory format, or the tensor itself if nothing is removed.

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
