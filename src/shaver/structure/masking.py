"""Units as masks: what a network does without them, before anything is removed."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from shaver.naming import check_name
from shaver.pruning.masks import Masks
from shaver.structure.groups import Groups


def mask_units(model: nn.Module, groups: Groups, kept: Mapping[str, Tensor]) -> Masks:
    """Masks that zero everything that belongs to the units not kept: what makes them and what reads them.

    Both sides are zeroed, so the unit adds nothing to what follows, whatever its activation gives for zero, and no
    gradient reaches it: under ``masks.hold(model, optimizer)`` it stays away during training.

    Example:
        >>> masks = mask_units(model, groups, chosen.kept)      # doctest: +SKIP
        >>> masks.apply_(model)                                 # doctest: +SKIP

    Args:
        model: The network; not changed.
        groups: Its groups.
        kept: Group → one truth value a unit; groups that are absent stay whole.

    Raises:
        ValueError: A group is unknown, or has another number of units.
    """
    check_kept(groups, kept)
    parameters = dict(model.named_parameters(remove_duplicate=False))
    masks: dict[str, Tensor] = {}
    for name, keep in kept.items():
        removed = ~keep.cpu()
        for piece in groups[name].slices:
            if piece.tensor in parameters:  # a norm's statistics are buffers: without its scale and shift they are idle
                weight = parameters[piece.tensor]
                mask = masks.setdefault(piece.tensor, torch.ones_like(weight, dtype=torch.bool))
                mask.index_fill_(piece.dim, piece.index[removed].reshape(-1).to(mask.device), False)
    return Masks(masks)


def check_kept(groups: Groups, kept: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` unless ``kept`` has a truth value for each unit of the groups that it names."""
    for name, keep in kept.items():
        units = groups[check_name("group", name, groups)].units
        if keep.dtype != torch.bool or keep.shape != (units,):
            raise ValueError(
                f"kept[{name!r}] is a {keep.dtype} tensor of shape {tuple(keep.shape)}; group {name!r} takes one truth "
                f"value for each of its {units} units."
            )
