"""Layouts: which entries of a tensor share one value, and how values spread over the tensor."""

from dataclasses import dataclass

import torch
from torch import Tensor

from shaver.selection import Dims, take


@dataclass(frozen=True)
class Axes:
    """One value per index along the dimensions ``keep`` of a tensor, shared along the other dimensions."""

    shape: torch.Size
    keep: tuple[int, ...]

    @property
    def size(self) -> torch.Size:
        """Shape of the values."""
        return torch.Size(self.shape[d] for d in self.keep)

    @property
    def uniform(self) -> bool:
        """Whether the whole tensor shares one value."""
        return not self.keep

    def expand(self, values: Tensor) -> Tensor:
        """The values, broadcastable to the tensor; no copy."""
        if self.uniform:
            return values
        return values.reshape([n if d in self.keep else 1 for d, n in enumerate(self.shape)])

    def reduce(self, tensor: Tensor) -> Tensor:
        """Sums over the entries that share one value. The tensor must broadcast to the parameter's shape."""
        summed = [d for d in range(len(self.shape)) if d not in self.keep]
        full = tensor.expand(self.shape)
        return full.sum(summed) if summed else full

    def select(self, values: Tensor, dims: Dims) -> tuple["Axes", Tensor]:
        """The layout and the values of the kept part of the tensor."""
        shape = torch.Size(len(dims[d]) if d in dims else n for d, n in enumerate(self.shape))
        return Axes(shape, self.keep), take(values, {i: dims[d] for i, d in enumerate(self.keep) if d in dims})


@dataclass(frozen=True, eq=False)
class Index:
    """One value per group of a user's own grouping of a tensor's weights."""

    shape: torch.Size
    ids: Tensor
    count: int

    uniform = False  # whether the whole tensor shares one value

    @property
    def size(self) -> torch.Size:
        """Shape of the values."""
        return torch.Size([self.count])

    def expand(self, values: Tensor) -> Tensor:
        """The value of each weight, broadcastable to the tensor."""
        return values[self.ids]

    def reduce(self, tensor: Tensor) -> Tensor:
        """Sums per group."""
        full = tensor.expand(self.shape)
        return full.new_zeros(self.count).index_add_(0, self.ids.expand(self.shape).reshape(-1), full.reshape(-1))

    def select(self, values: Tensor, dims: Dims) -> tuple["Index", Tensor]:
        """The layout and the values of the kept part of the tensor. Groups without kept weights are removed."""
        left, ids = torch.unique(take(self.ids.expand(self.shape), dims), return_inverse=True)
        return Index(ids.shape, ids, len(left)), values[left]


Layout = Axes | Index
