"""The fit of a layer whose outputs go through a ReLU: what the ReLU hides does not count.

    min Σ (ReLU(W x) − ReLU(y))²

is solved by a sequence of least-squares fits. Where the dense network's output y is negative, the target is the present
output if that is negative too, and zero otherwise. Elsewhere it is y. On LeNet with 80 % of its units removed, the
accuracy rose from 88 to 92 % (MNIST, no training).
"""

import torch
from torch import Tensor

from shaver.repairing.conditional import conjugate_gradients

#: Least-squares fits in a sequence, steps of conjugate gradients for each, and the length of a move.
FITS, STEPS, MOVE = 8, 10, 1.7


def rectified_fit(
    pairs: list[tuple[Tensor, Tensor]], second: Tensor, start: Tensor, kept: Tensor, mean: Tensor, damping: Tensor
) -> Tensor:
    """Weights whose outputs are nearest to the dense network's after a ReLU, in float64.

    Args:
        pairs: Inputs x, ``(rows, inputs)``, and the dense network's outputs y, ``(rows, outputs)``, of each batch.
        second: Σ x xᵀ, with the constant 1 as the last input.
        start: The least-squares weights, ``(outputs, inputs + 1)``; returned where nothing better is found.
        kept: Which weights are kept.
        mean: The weights that the prior holds them near.
        damping: Λ, broadcastable to the weights.
    """
    best = present = start
    lowest, cross = _error_and_cross(pairs, start)
    for _ in range(FITS):
        fitted = conjugate_gradients(second, cross + damping * mean, kept, present, damping, steps=STEPS)
        present = present + MOVE * (fitted - present)
        error, cross = _error_and_cross(pairs, present)
        best = torch.where((error < lowest).unsqueeze(1), present, best)
        lowest = torch.minimum(error, lowest)
    return best


def rectified_error(pairs: list[tuple[Tensor, Tensor]], weight: Tensor) -> Tensor:
    """Σ (ReLU(W x) − ReLU(y))² of each output."""
    errors = (_squares(_outputs(x, weight), y) for x, y in pairs)
    return sum(errors, torch.zeros_like(weight[:, 0]))


def rectified_variance(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Σ (ReLU(y) − mean)² of each output."""
    shown = [y.relu().double() for _, y in pairs]
    mean = torch.stack([y.sum(0) for y in shown]).sum(0) / sum(map(len, shown))
    return torch.stack([(y - mean).square().sum(0) for y in shown]).sum(0)


def _outputs(x: Tensor, weight: Tensor) -> Tensor:
    return torch.addmm(weight[:, -1].to(x), x, weight[:, :-1].t().to(x))


def _squares(outputs: Tensor, y: Tensor) -> Tensor:
    """Σ (ReLU(outputs) − ReLU(y))² of each output."""
    return outputs.relu().sub_(y.relu()).square_().sum(0, dtype=torch.float64)


def _error_and_cross(pairs: list[tuple[Tensor, Tensor]], weight: Tensor) -> tuple[Tensor, Tensor]:
    """The error of each output, and Σ t xᵀ with the target t, from one pass over the batches."""
    error, cross = torch.zeros_like(weight[:, 0]), torch.zeros_like(weight)
    for x, y in pairs:
        outputs = _outputs(x, weight)
        error += _squares(outputs, y)
        target = torch.where(y < 0, outputs.clamp_(max=0), y)
        cross += torch.cat([target.mT @ x, target.sum(0).unsqueeze(1)], 1)
    return error, cross
