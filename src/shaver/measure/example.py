"""Example inputs of a network, at any batch size."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from shaver.batches import LABELS

#: Inputs of a network: one tensor, positional arguments, or keyword arguments (an entry ``labels`` is ignored).
Example = Tensor | tuple[Any, ...] | Mapping[str, Any]


def samples_of(example: Example) -> int:
    """The example's batch size: the length of its first tensor."""
    if isinstance(example, Mapping):
        values = [value for key, value in example.items() if key != LABELS]
    else:
        values = list(example) if isinstance(example, tuple) else [example]
    for value in values:
        if isinstance(value, Tensor) and value.ndim and len(value):
            return len(value)
    given = (
        f"a tensor of shape {tuple(example.shape)}" if isinstance(example, Tensor) else f"a {type(example).__name__}"
    )
    raise ValueError(
        f"the example must hold at least one sample: a tensor whose first dimension is the batch, a tuple of "
        f"positional arguments or a dict of keyword arguments, not {given}."
    )


def resize(example: Example, samples: int) -> Example:
    """The example at another batch size: its samples, repeated from the first as often as needed."""
    resized: Example = cycled(dict(example) if isinstance(example, Mapping) else example, samples_of(example), samples)
    return resized


def cycled(example: Any, size: int, samples: int) -> Any:
    """All tensors of ``size`` samples with another number of samples, cyclically; everything else as it is."""

    def one(value: Tensor) -> Tensor:
        fits = value.ndim and size and len(value) == size
        return value[torch.arange(samples, device=value.device) % size] if fits else value

    return tree_map_only(Tensor, one, example)


def call(model: nn.Module, example: Example) -> Any:
    """The network's outputs for the example."""
    if isinstance(example, Tensor):
        return model(example)
    if isinstance(example, Mapping):
        return model(**{key: value for key, value in example.items() if key != LABELS})
    return model(*example)
