"""Evaluation mode for a while: no gradients, and every submodule's own mode given back."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients inside the block; after it, or after an error, each module is in the mode it was.

    ``model.train(was_training)`` would not do: a frozen BatchNorm inside a training model would wake up.
    """
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training
