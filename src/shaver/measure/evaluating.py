"""Evaluation mode inside a block: no gradients, and each module's mode is restored afterwards."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients inside the block. Afterwards, also after an error, each mode is restored.

    ``model.train(was_training)`` is not enough: it would set a frozen BatchNorm in a training model to train mode.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
