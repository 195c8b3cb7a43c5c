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


def kept_units(groups: Groups, masks: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The units of which masks leave anything: what :func:`mask_units` was given, read back.

    Example:
        >>> kept = kept_units(groups, history.masks)                                                # doctest: +SKIP
        >>> standing = kept_units(groups, {name: p != 0 for name, p in model.named_parameters()})   # doctest: +SKIP

    A unit counts as removed where all that makes it, or all that reads it, is masked: either way it does nothing.

    Args:
        groups: Of the model.
        masks: Parameter → where it is kept; parameters without a mask are kept.
    """
    kept = {}
    for name, group in groups.items():
        alive = {role: torch.zeros(group.units, dtype=torch.bool) for role in ("makes", "reads")}
        known = dict.fromkeys(alive, False)
        for piece in group.slices:
            if piece.tensor in masks:
                mask = masks[piece.tensor].cpu().transpose(0, piece.dim)
                along = mask.flatten(1).any(1) if mask.ndim > 1 else mask
                alive[piece.role] |= along[piece.index].any(1)
                known[piece.role] = True
        kept[name] = torch.ones(group.units, dtype=torch.bool)
        for role in alive:
            if known[role]:
                kept[name] &= alive[role]
    return kept
