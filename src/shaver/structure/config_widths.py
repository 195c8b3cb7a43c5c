"""Widths that the configuration of a transformers model can express, so that plain transformers opens the small model.

A configuration has one entry for the hidden units of all layers, and one for their heads. So the groups behind an entry
must keep the same number of units. Whether an entry exists is tried out: a model without weights loses half of the
units, and counts if its class builds the same shapes from an adapted configuration.
"""

import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor, nn

from shaver.structure.groups import Groups
from shaver.structure.record import record_of, resize
from shaver.structure.transformers_models import is_pretrained, opens, skeleton

#: Group → a label that it shares with the groups that must keep the same number of units.
Ties = Mapping[str, str]

NOT_EXPRESSED = "the model's configuration cannot express another width of it; free_widths=True removes its units too"


def expressible(model: nn.Module, groups: Groups) -> tuple[Groups, Ties]:
    """The groups whose widths a configuration can express, and which of them must keep the same number of units."""
    if not is_pretrained(model):
        return groups, {}
    ties: dict[str, str] = {}
    for label, names in _by(lambda name: f"{groups[name].kind} of {groups[name].units}", groups).items():
        parts = {label: names}
        if not _expresses(model, groups, names):  # some of these widths may be of another layer type
            parts = _by(lambda name: re.sub(r"\d+", "*", name), names)
            parts = {part: members for part, members in parts.items() if _expresses(model, groups, members)}
        ties |= {name: part for part, members in parts.items() for name in members}
    if not ties:
        raise ValueError(
            f"the configuration of {type(model).__name__} can express no other width of {', '.join(groups)}; pass "
            "free_widths=True, and store the small network with shaver.save."
        )
    left_out = groups.left_out | {name: NOT_EXPRESSED for name in groups if name not in ties}
    return Groups({name: groups[name] for name in groups if name in ties}, left_out, groups.shapes), ties


def evened(kept: Mapping[str, Tensor], ties: Ties) -> dict[str, Tensor]:
    """The same choice, but a group that keeps fewer units than a tied one gets its first removed units back."""
    evened = {name: keep.clone() for name, keep in kept.items()}
    for name, label in ties.items():
        width = max(int(kept[other].sum()) for other, its in ties.items() if its == label)
        missing = width - int(kept[name].sum())
        evened[name][(~kept[name]).nonzero().flatten()[:missing]] = True
    return evened


def _by(key: Callable[[str], str], names: Iterable[str]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = defaultdict(list)
    for name in names:
        found[key(name)].append(name)
    return found


def _expresses(model: nn.Module, groups: Groups, names: Sequence[str]) -> bool:
    small = skeleton(model)
    if small is None:
        return False
    kept = {name: torch.arange(groups[name].units) < (groups[name].units + 1) // 2 for name in names}
    try:
        resize(small, record_of(small, groups, kept))
    except ValueError:
        return False
    return opens(small)
