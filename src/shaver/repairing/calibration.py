"""Calibration batches: inputs without labels, in any layout that the model can be called with."""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from shaver.batches import Forward, batch_size_of, check_batches
from shaver.measure import example

#: What is read of a loader or generator: this many samples, or this many batches. A list is taken whole.
SAMPLES, BATCHES = 4096, 512


def call(model: nn.Module, batch: Any, forward: Forward | None = None) -> Any:
    """Run the network on one calibration batch.

    A tensor calls ``model(x)``. Of a tuple or list the first entry is the input, and the others count only if the last
    is not a target: ``(x,)`` and ``(x, y)`` call ``model(x)``, ``(x1, x2, y)`` calls ``model(x1, x2)``. A dict calls
    the model with every entry but ``labels`` by name.

    Raises:
        TypeError: The batch is of another kind.
    """
    if forward is not None:
        return forward(model, batch)
    if isinstance(batch, Tensor | Mapping):
        return example.call(model, batch)
    if isinstance(batch, tuple | list) and batch:
        return model(*(batch[:-1] if len(batch) > 1 else batch))
    raise TypeError(
        f"a calibration batch is a tensor, a tuple (inputs, …) or a dict, not a {type(batch).__name__}; "
        "forward=lambda model, batch: … reads another layout."
    )


def calibration_list(batches: Iterable[Any]) -> list[Any]:
    """The batches as a list that can be read many times, the same each time.

    All batches are kept in memory, and a forward pass of each waits at every layer. A whole training set would take
    hours, so a loader or a generator is read up to :data:`SAMPLES` samples or :data:`BATCHES` batches. A list or tuple
    is taken as it is.

    Raises:
        TypeError: It is one batch instead of an iterable of batches.
        ValueError: There are none.
    """
    if isinstance(batches, Tensor | Mapping):
        raise TypeError(
            f"calibration takes an iterable of batches; for a single one pass [batch], not a {type(batches).__name__}."
        )
    with torch.random.fork_rng(devices=[]):  # a loader draws its order from the global generator
        found: list[Any] = []
        samples = 0
        for batch in check_batches(batches, "calibration"):
            found.append(batch)
            with suppress(TypeError):  # a layout of the user's own; the batches are counted
                samples += batch_size_of(batch)
            if not isinstance(batches, list | tuple) and (samples >= SAMPLES or len(found) >= BATCHES):
                break
    if not found:
        raise ValueError("there are no calibration batches: the iterable is empty.")
    return found
