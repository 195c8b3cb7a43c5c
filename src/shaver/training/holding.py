"""Zeros that stay zero during training: a pruned network's masks, held while the rest is fine-tuned."""

import hashlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from shaver.pruning import Masks


class Held:
    """Fixed masks in force on a network in training; the counterpart of an online pruner, whose masks grow."""

    def __init__(self, masks: "Masks", model: nn.Module, optimizer: Optimizer) -> None:
        self.masks = masks
        self._hold = masks.hold(model, optimizer)

    def after_step(self, progress: float) -> None:
        """Nothing: the masks are what they are."""

    def after_epoch(self, progress: float) -> None:
        """Nothing."""

    def release(self) -> None:
        """Let go; the zeros are then ordinary weights."""
        self._hold.release()

    def state_dict(self) -> dict[str, Any]:
        """Nothing to save: whoever resumes gives the same masks again, which is checked."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Zero what the masks remove, once more."""
        self._hold.apply_()


def check_masks(masks: object, model: nn.Module) -> None:
    """Refuse what are not masks of this model, before anything is changed.

    Raises:
        TypeError: They are no :class:`shaver.pruning.Masks`.
        ValueError: They belong to another model.
    """
    if not hasattr(masks, "hold") or not isinstance(masks, Mapping):
        raise TypeError(
            f"masks= takes shaver.pruning.Masks, such as the masks of what shaver.prune returns, not a "
            f"{type(masks).__name__}; shaver.pruning.Masks({{name: tensor}}) makes them of boolean tensors."
        )
    masks.parameters(model)  # type: ignore[attr-defined]


def fingerprint(masks: "Masks") -> str:
    """Masks in one line that differs for different masks, so that a run is not resumed with others."""
    checksum = hashlib.sha256()
    for name, mask in masks.items():
        checksum.update(f"{name} {tuple(mask.shape)}\n".encode())
        checksum.update(mask.cpu().contiguous().numpy().tobytes())
    return f"{masks.kept} of {masks.total} weights, {checksum.hexdigest()[:16]}"
