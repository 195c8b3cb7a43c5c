"""What training reads from: data held in memory, a DataLoader, or any list of batches, seen in one way."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor

from shaver.batches import batch_size_of
from shaver.training.identity import fingerprint


@dataclass
class Source:
    """Batches that can be read again every epoch.

    Attributes:
        batches: The iterable itself.
        data_size: N, the number of samples of an epoch.
        count: The number of batches of an epoch.
        origin: What the user gave.
    """

    batches: Iterable[Any]
    data_size: int
    count: int
    origin: Any = None

    @property
    def description(self) -> str:
        """The data in words that differ for other data."""
        return f"{self.data_size} samples in {self.count} batches, contents {fingerprint(self.origin)}"

    def epoch(self, number: int) -> Iterable[Any]:
        """The batches of one epoch, in an order that depends on its number (or on the global generator)."""
        owners: tuple[Any, ...] = (self.batches, getattr(self.batches, "sampler", None))
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(number)
        return self.batches

    def first(self) -> Any:
        """One batch, to look at; the order of those to come is not disturbed."""
        states = [(generator, generator.get_state()) for generator in self.generators()]
        try:
            with torch.random.fork_rng(devices=[]):
                return next(iter(self.batches))
        finally:
            for generator, state in states:
                generator.set_state(state)

    def generators(self) -> list[torch.Generator]:
        """Generators a DataLoader draws from besides the global one: their state is part of a checkpoint."""
        owners = (self.batches, getattr(self.batches, "sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def open_source(data: Any, role: str, batch_size: int, *, shuffle: bool, seed: int = 0) -> Source:
    """Read ``data`` as batches, and count them.

    Raises:
        TypeError: It cannot be iterated, or only once.
        ValueError: It is empty.
    """
    if hasattr(data, "batches"):
        batches = data.batches(batch_size, shuffle=True, seed=seed) if shuffle else data.batches(batch_size)
    else:
        batches = data
    if not isinstance(batches, Iterable):
        raise TypeError(
            f"{role} must be data with .batches(), a DataLoader or a list of batches, not {type(data).__name__}."
        )
    if isinstance(batches, Iterator):
        raise TypeError(
            f"{role} is a {type(batches).__name__}, which can be read only once, and training reads it every epoch; "
            "pass a list of batches, a DataLoader or an object with __iter__."
        )
    data_size, count = _count(batches)
    if not count or not data_size:
        raise ValueError(f"{role} is empty: it gave {count} batches with {data_size} samples.")
    return Source(batches, data_size, count, data)


def _count(batches: Iterable[Any]) -> tuple[int, int]:
    try:
        count = len(batches)  # type: ignore[arg-type]
        size = getattr(batches, "data_size", None)
        if size is None:
            size = len(batches.dataset)  # type: ignore[attr-defined]
        return int(size), count
    except (TypeError, AttributeError):  # no length, or no data set behind it: count the samples
        sizes = [batch_size_of(batch) for batch in batches]
        return sum(sizes), len(sizes)


def chunks(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of ``size`` batches; the last may be shorter."""
    iterator = iter(batches)
    while group := list(islice(iterator, size)):
        yield group


def to_device(batch: Any, device: torch.device) -> Any:
    """The batch with its tensors on ``device``; dicts, tuples and lists keep their kind."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if isinstance(batch, Mapping):
        return {key: to_device(value, device) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        moved = [to_device(value, device) for value in batch]
        return type(batch)(*moved) if hasattr(batch, "_fields") else type(batch)(moved)  # a named tuple takes fields
    return batch
