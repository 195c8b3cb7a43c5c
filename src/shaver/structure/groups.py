"""Units that must go together: channels, hidden units and attention heads, and every slice of a tensor they own."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

Role = Literal["makes", "reads"]
Kind = Literal["channels", "hidden", "heads", "residual"]


@dataclass(frozen=True)
class Slice:
    """Where the units of a group lie in one tensor.

    Attributes:
        tensor: Qualified name of a parameter or buffer.
        dim: The dimension along which the units lie.
        index: ``(units, k)``: the positions along ``dim`` that belong to each unit; ``k`` is 1 for a channel, the
            positions of a flattened feature map behind a convolution, 3 × head width for a head in a packed
            projection.
        role: ``"makes"``: the tensor makes the unit (rows of a layer, its bias, a norm's affine and statistics) and
            zero there silences it. ``"reads"``: the tensor reads what the unit made (columns of the next layer).
    """

    tensor: str
    dim: int
    index: Tensor
    role: Role


@dataclass(frozen=True)
class Group:
    """One family of interchangeable units, such as the output channels of a convolution.

    Attributes:
        name: The module whose width this is, such as ``conv1``, ``blocks.0.mlp.fc1`` or ``blocks.0.attention``.
        kind: ``"channels"``, ``"hidden"``, ``"heads"`` or ``"residual"``.
        units: How many there are.
        slices: Everything that belongs to them.
    """

    name: str
    kind: str
    units: int
    slices: tuple[Slice, ...]


class Groups(Mapping[str, Group]):
    """The groups of a model by name, in the order in which data flow.

    Example:
        >>> groups = find_groups(model, example)
        >>> print(groups)                       # group, kind, units, what belongs to it
        >>> kept = {"conv1": torch.tensor([True, False, True, True, False, True])}

    Attributes:
        left_out: Layers whose outputs are in no group, and why.
    """

    def __init__(self, groups: Mapping[str, Group], left_out: Mapping[str, str] | None = None) -> None:
        self._groups = dict(groups)
        self.left_out = dict(left_out or {})

    def __getitem__(self, name: str) -> Group:
        return self._groups[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._groups)

    def __len__(self) -> int:
        return len(self._groups)

    def __str__(self) -> str:
        width = max([5, *map(len, self)])
        lines = [f"{'group':<{width}}  {'kind':<8}  {'units':>6}  what belongs to it"]
        for name, group in self.items():
            owned = ", ".join(f"{s.tensor}[{s.dim}]" for s in group.slices)
            lines.append(f"{name:<{width}}  {group.kind:<8}  {group.units:>6}  {owned}")
        return "\n".join(lines)

    def check(self, model: nn.Module) -> None:
        """Every slice lies inside a tensor of the model, else a ``ValueError`` names it."""
        tensors = {**dict(model.named_parameters(remove_duplicate=False)), **dict(model.named_buffers())}
        for name, group in self.items():
            for piece in group.slices:
                if piece.tensor not in tensors:
                    raise ValueError(f"group {name!r} names {piece.tensor!r}, which {type(model).__name__} has not.")
                size = tensors[piece.tensor].shape[piece.dim]
                if piece.index.shape[0] != group.units or int(piece.index.max()) >= size or int(piece.index.min()) < 0:
                    raise ValueError(
                        f"group {name!r} does not fit {piece.tensor!r}: {group.units} units at positions up to "
                        f"{int(piece.index.max())} of dimension {piece.dim}, which has {size}."
                    )


def remaining(
    groups: Groups, kept: Mapping[str, Tensor], sizes: Mapping[str, torch.Size]
) -> dict[str, dict[int, Tensor]]:
    """Tensor → dimension → the positions that stay, when only the units in ``kept`` do; tensors not touched are absent.

    Args:
        groups: Of the model.
        kept: Group → one truth value a unit; groups that are absent stay whole.
        sizes: The shapes of the model's parameters and buffers.
    """
    staying: dict[str, dict[int, Tensor]] = {}
    for name, keep in kept.items():
        for piece in groups[name].slices:
            dims = staying.setdefault(piece.tensor, {})
            mask = dims.setdefault(piece.dim, torch.ones(sizes[piece.tensor][piece.dim], dtype=torch.bool))
            mask[piece.index[~keep.cpu()].reshape(-1)] = False
    return {tensor: {d: mask.nonzero().squeeze(1) for d, mask in dims.items()} for tensor, dims in staying.items()}
