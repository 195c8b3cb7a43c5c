"""A network inside a block of code: evaluation mode, attention without fused kernels, tensors restored afterwards."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn


@contextmanager
def evaluating(*models: nn.Module) -> Iterator[None]:
    """Evaluation mode without gradients inside the block. Afterwards, also after an error, each mode is restored.

    ``model.train(was_training)`` is not enough: it would set a frozen BatchNorm in a training model to train mode.
    """
    modes = [(module, module.training) for model in models for module in model.modules()]
    try:
        for model in models:
            model.eval()
        with torch.no_grad():
            yield
    finally:
        for module, training in modes:
            module.training = training


@contextmanager
def restored(tensors: Iterable[Tensor], *, always: bool = False) -> Iterator[None]:
    """Give tensors their values back, in place, if the block ends with an error or an interruption, or ``always``."""
    before = [(tensor, tensor.detach().clone()) for tensor in tensors]
    is_done = False
    try:
        yield
        is_done = not always
    finally:
        if not is_done:
            with torch.no_grad():
                for tensor, values in before:
                    tensor.copy_(values)


@contextmanager
def unfused_attention() -> Iterator[None]:
    """Attention and encoder layers of torch call the layers inside them instead of one fused kernel."""
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
