"""Peak memory of a call.

The method is the same on every device. It records the results of every operation. A storage counts from the operation
that creates it until its last tensor is freed; views count once. Not included are temporary memory inside an operation
(such as the unfolded input of a convolution) and memory that an allocator keeps in reserve.
"""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from shaver.measure.evaluating import evaluating
from shaver.measure.example import Example, call, samples_of


def peak_memory(model: nn.Module, example: Example) -> int:
    """The peak number of bytes during a call without gradients: weights, buffers, inputs and all results in use.

    Example:
        >>> peak_memory(nn.Linear(10, 5), torch.zeros(3, 10))  # weights 220, input 120, output 60
        400

    Args:
        model: The network; it is called once in evaluation mode.
        example: Inputs, at the batch size of the call.
    """
    samples_of(example)
    inputs = tree_leaves(example if isinstance(example, Tensor | tuple) else dict(example))
    recorder = _StorageRecorder()
    recorder.record([*model.parameters(), *model.buffers(), *inputs])
    try:
        with evaluating(model), recorder:
            call(model, example)
    finally:
        recorder.stop()
    return recorder.peak


class _StorageRecorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the bytes of all storages in use."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.sizes: dict[int, int] = {}
        self.callbacks: dict[int, Any] = {}
        self.live = 0
        self.peak = 0

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        self.record(tree_leaves(result))
        return result

    def record(self, tensors: Iterable[object]) -> None:
        """Count new storages until they are freed."""
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.layout != torch.strided:
                continue
            storage = tensor.untyped_storage()
            key = storage._cdata
            if key not in self.sizes:
                self.sizes[key] = storage.nbytes()
                self.live += storage.nbytes()
                self.callbacks[key] = weakref.finalize(storage, self.forget, key)
        self.peak = max(self.peak, self.live)

    def forget(self, key: int) -> None:
        """Stop counting a storage that has been freed."""
        self.live -= self.sizes.pop(key)
        del self.callbacks[key]

    def stop(self) -> None:
        """Remove the callbacks from storages that stay in use, such as the weights'."""
        for callback in list(self.callbacks.values()):
            callback.detach()
