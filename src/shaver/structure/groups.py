"""Units that must be removed together: channels, hidden units, heads, and every slice that belongs to them."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from shaver.naming import check_name
from shaver.pruning.masks import Masks

Role = Literal["makes", "reads"]
Kind = Literal["channels", "hidden", "heads", "residual"]
#: Group → one truth value per unit: whether it stays. Groups that are absent stay whole.
Kept = Mapping[str, Tensor]


@dataclass(frozen=True)
class Slice:
    """Where the units of a group lie in one tensor.

    Attributes:
        tensor: Qualified name of a parameter or buffer.
        dim: The dimension along which the units lie.
        index: ``(units, k)``: the positions along ``dim`` that belong to each unit. ``k`` is 1 for a channel, the
            number of positions of a flattened feature map, or 3 × head width for a head in a packed projection.
        role: ``"makes"``: the tensor makes the unit (rows of a layer, its bias, a norm's affine and statistics), and
            zeros there silence it. ``"reads"``: the tensor reads what the unit made (columns of the next layer).
    """

    tensor: str
    dim: int
    index: Tensor
    role: Role


@dataclass(frozen=True)
class Group:
    """A set of interchangeable units, such as the output channels of a convolution.

    Attributes:
        name: The module whose width this is, such as ``conv1``, ``blocks.0.mlp.fc1`` or ``blocks.0.attention``.
        kind: ``"channels"``, ``"hidden"``, ``"heads"`` or ``"residual"``.
        units: The number of units.
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
        shapes: The shapes of the tensors in the groups; empty where the groups were written by hand.
    """

    def __init__(
        self,
        groups: Mapping[str, Group],
        left_out: Mapping[str, str] | None = None,
        shapes: Mapping[str, torch.Size] | None = None,
    ) -> None:
        self._groups = dict(groups)
        self.left_out = dict(left_out or {})
        self.shapes = dict(shapes or {})

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

    @property
    def whole(self) -> dict[str, Tensor]:
        """Every unit of every group, as a ``kept``."""
        return {name: torch.ones(group.units, dtype=torch.bool) for name, group in self.items()}

    def check(self, model: nn.Module) -> None:
        """Check that the groups belong to the model: every slice lies inside a tensor of the shape that it had.

        Raises:
            ValueError: They belong to another network, or to this one before it was made smaller.
        """
        tensors = tensors_of(model)
        for name, shape in self.shapes.items():
            if name in tensors and tensors[name].shape != shape:
                raise ValueError(
                    f"the groups were found in a network whose {name!r} has shape {tuple(shape)}; in this "
                    f"{type(model).__name__} it has shape {tuple(tensors[name].shape)}. Find them again."
                )
        for name, group in self.items():
            for piece in group.slices:
                if piece.tensor not in tensors:
                    raise ValueError(
                        f"group {name!r} contains {piece.tensor!r}, which {type(model).__name__} does not have. "
                        "Groups belong to the network that find_groups was given."
                    )
                shape = tensors[piece.tensor].shape
                size = shape[piece.dim] if piece.dim < len(shape) else 0
                if piece.index.shape[0] != group.units or int(piece.index.max()) >= size or int(piece.index.min()) < 0:
                    raise ValueError(
                        f"group {name!r} does not fit {piece.tensor!r}: {group.units} units at positions up to "
                        f"{int(piece.index.max())} of dimension {piece.dim}, which has {size}."
                    )

    def check_kept(self, kept: Kept) -> None:
        """Check that ``kept`` has one truth value for each unit of the groups that it names.

        Raises:
            ValueError: A group is unknown, or its values have another shape or type.
        """
        if not isinstance(kept, Mapping):
            raise TypeError(f"kept is a dict of truth values per unit, by group, not {kept!r}.")
        for name, keep in kept.items():
            units = self[check_name("group", name, self)].units
            if not isinstance(keep, Tensor) or keep.dtype != torch.bool or keep.shape != (units,):
                is_tensor = isinstance(keep, Tensor)
                given = f"a {keep.dtype} tensor of shape {tuple(keep.shape)}" if is_tensor else repr(keep)
                raise ValueError(f"kept[{name!r}] takes one truth value for each of its {units} units, not {given}.")


def check_groups(groups: object, model: nn.Module) -> Groups:
    """Groups that belong to a model."""
    if not isinstance(groups, Groups):
        raise TypeError(f"groups come from shaver.structure.find_groups(model, example), not {groups!r}.")
    groups.check(model)
    return groups


def tensors_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers; tied ones appear under each of their names."""
    return dict([*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)])


def remaining(groups: Groups, kept: Kept, sizes: Mapping[str, torch.Size]) -> dict[str, dict[int, Tensor]]:
    """Tensor → dimension → the positions that stay; tensors that lose nothing are absent.

    ``sizes`` has the shapes of the model's parameters and buffers.
    """
    staying: dict[str, dict[int, Tensor]] = {}
    for name, keep in kept.items():
        for piece in groups[name].slices:
            dims = staying.setdefault(piece.tensor, {})
            mask = dims.setdefault(piece.dim, torch.ones(sizes[piece.tensor][piece.dim], dtype=torch.bool))
            mask[piece.index[~keep.cpu()].reshape(-1)] = False
    return {tensor: {d: mask.nonzero().squeeze(1) for d, mask in dims.items()} for tensor, dims in staying.items()}


def mask_units(model: nn.Module, groups: Groups, kept: Kept) -> Masks:
    """Masks that zero everything that belongs to the units not kept: what makes them and what reads them.

    With both sides zero, a unit adds nothing to the outputs, whatever its activation gives for zero, and receives no
    gradient: under ``masks.hold(model, optimizer)`` it stays removed during training.

    Example:
        >>> masks = mask_units(model, groups, choice.kept)
        >>> masks.apply_(model)

    The model is not changed. Groups that are absent in ``kept`` stay whole.

    Raises:
        ValueError: A group is unknown, or has another number of units.
    """
    groups.check_kept(kept)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    masks: dict[str, Tensor] = {}
    for name, keep in kept.items():
        removed = ~keep.cpu()
        for piece in groups[name].slices:
            if piece.tensor in parameters:  # a norm's statistics are buffers: without scale and shift they do nothing
                weight = parameters[piece.tensor]
                mask = masks.setdefault(piece.tensor, torch.ones_like(weight, dtype=torch.bool))
                mask.index_fill_(piece.dim, piece.index[removed].reshape(-1).to(mask.device), False)
    return Masks(masks)


def kept_units(groups: Groups, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The units of which masks keep something: the inverse of :func:`mask_units`.

    Example:
        >>> kept = kept_units(groups, history.masks)
        >>> alive = kept_units(groups, {name: p != 0 for name, p in model.named_parameters()})

    A unit counts as removed where all that makes it, or all that reads it, is masked: either way it does nothing.
    Parameters without a mask are kept.
    """
    kept = {}
    for name, group in groups.items():
        alive: dict[str, Tensor] = {}  # for each role, the units of which something is kept
        for piece in group.slices:
            if piece.tensor in masks:
                mask = masks[piece.tensor].cpu().movedim(piece.dim, 0)
                here = mask.reshape(len(mask), -1).any(1)[piece.index].any(1)
                alive[piece.role] = alive.get(piece.role, here) | here
        kept[name] = torch.stack([torch.ones(group.units, dtype=torch.bool), *alive.values()]).all(0)
    return kept
