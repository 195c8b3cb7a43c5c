"""Failed training: numbers that are not finite stop it at once, and a network that has died is detected."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

#: Maximum number of outputs per sample that are compared.
_COMPARED = 4096


class Diverged(RuntimeError):
    """Training produced a number that is not finite.

    Attributes:
        epoch: The epoch, counted from 1.
        step: The optimizer step since the start of training, counted from 1.
        culprit: What was not finite, in words.
    """

    def __init__(self, epoch: int, step: int, culprit: str, advice: str) -> None:
        super().__init__(f"training diverged in epoch {epoch}, step {step}: {culprit}. {advice}")
        self.epoch, self.step, self.culprit = epoch, step, culprit


def explain_loss(model: nn.Module, batch: Any, outputs: Tensor, loss: float, what: str = "the loss") -> str:
    """Say why the loss of a batch is not finite: the data, a parameter, or the outputs."""
    if found := _first_bad(_tensors(batch)):
        return f"{what} is {loss} because the batch itself has values that are not finite ({found})"
    if found := _first_bad(model.named_parameters()):
        return f"{what} is {loss} because parameter {found}"
    if found := _first_bad(model.named_buffers()):
        return f"{what} is {loss} because buffer {found}"
    if found := _first_bad([("outputs", outputs)]):
        return f"{what} is {loss} although data and parameters are finite: the network's {found}"
    return f"{what} is {loss} although data, parameters and outputs are finite"


def explain_gradient(model: nn.Module) -> str | None:
    """Name the first gradient that is not finite; ``None`` if all are."""
    found = _first_bad((name, p.grad) for name, p in model.named_parameters() if p.grad is not None)
    return f"the loss is finite but the gradient of {found}" if found else None


def explain_parameters(model: nn.Module) -> str | None:
    """Name the first parameter that is not finite; ``None`` if all are."""
    found = _first_bad(model.named_parameters())
    return f"parameter {found} at the end of the epoch" if found else None


def _first_bad(tensors: Iterable[tuple[str, Tensor]]) -> str | None:
    for name, tensor in tensors:
        if tensor.is_floating_point():
            bad = tensor.numel() - int(torch.isfinite(tensor).sum())
            if bad:
                return f"{name!r} is not finite in {bad} of {tensor.numel()} places"
    return None


def _tensors(batch: Any) -> Iterable[tuple[str, Tensor]]:
    entries = (
        batch.items() if isinstance(batch, Mapping) else enumerate(batch) if isinstance(batch, tuple | list) else []
    )
    return [(str(key), value) for key, value in entries if isinstance(value, Tensor)]


def ignores_input(outputs: Tensor) -> bool:
    """Whether all samples of a batch have the same outputs, because the units between input and output have died.

    The loss is then at chance level, and only biases learn. Of large outputs only some entries are compared.
    """
    if len(outputs) < 2 or not outputs.is_floating_point():
        return False
    rows = outputs.detach().flatten(1)
    rows = rows[:, :: -(-rows.shape[1] // _COMPARED)]
    # Rounding depends on the place in the batch.
    tolerance = 0.0 if rows.element_size() < 4 else 8 * torch.finfo(rows.dtype).eps
    return float((rows - rows[:1]).abs().max()) <= tolerance * float(rows.abs().max())
