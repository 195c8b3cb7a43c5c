"""Training data behind one interface: data in memory, a DataLoader, or any list of batches."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from shaver.batches import batch_size_of
from shaver.training.identity import fingerprint


@dataclass
class Source:
    """Batches that can be read again every epoch.

    Attributes:
        batches: The iterable itself.
        data_size: N, the number of samples per epoch.
        count: The number of batches per epoch.
        origin: The data that the user passed.
    """

    batches: Iterable[Any]
    data_size: int
    count: int
    origin: Any = None

    @property
    def description(self) -> str:
        """A description that differs between different data."""
        return f"{self.data_size} samples in {self.count} batches, contents {fingerprint(self.origin)}"

    def epoch(self, number: int) -> Iterable[Any]:
        """The batches of one epoch, in an order that depends on its number (or on the global generator)."""
        owners: tuple[Any, ...] = (self.batches, getattr(self.batches, "sampler", None))
        for owner in owners:
            if hasattr(owner, "set_epoch"):
                owner.set_epoch(number)
        return self.batches

    def first(self) -> Any:
        """One batch. The order of later batches does not change."""
        states = [(generator, generator.get_state()) for generator in self.generators()]
        try:
            with torch.random.fork_rng(devices=[]):
                return next(iter(self.batches))
        finally:
            for generator, state in states:
                generator.set_state(state)

    def generators(self) -> list[torch.Generator]:
        """Generators that a DataLoader uses besides the global one; a checkpoint holds their state."""
        owners = (self.batches, getattr(self.batches, "sampler", None))
        found = [getattr(owner, "generator", None) for owner in owners]
        return list({id(g): g for g in found if isinstance(g, torch.Generator)}.values())


def open_source(data: Any, role: str, batch_size: int, *, shuffle: bool, seed: int = 0) -> Source:
    """Turn ``data`` into batches and count them. Data that are empty, or can be read only once, are refused."""
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
        raise ValueError(f"{role} is empty: it has {count} batches with {data_size} samples.")
    return Source(batches, data_size, count, data)


def _count(batches: Iterable[Any]) -> tuple[int, int]:
    try:
        count = len(batches)  # type: ignore[arg-type]
        size = getattr(batches, "data_size", None)
        if size is None:
            size = len(batches.dataset)  # type: ignore[attr-defined]
        return int(size), count
    except (TypeError, AttributeError):  # no length, or no data set: count the batches once
        sizes = [batch_size_of(batch) for batch in batches]
        return sum(sizes), len(sizes)


def chunks(batches: Iterable[Any], size: int) -> Iterator[list[Any]]:
    """Lists of ``size`` batches; the last may be shorter."""
    iterator = iter(batches)
    while group := list(islice(iterator, size)):
        yield group


def to_device(batch: Any, device: torch.device) -> Any:
    """Copies of the batch's tensors on ``device``, so that a network may change its input in place."""
    return tree_map(lambda v: v.to(device, non_blocking=True, copy=True) if isinstance(v, Tensor) else v, batch)
