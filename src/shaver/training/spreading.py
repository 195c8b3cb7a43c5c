"""``fit`` in several processes under ``torchrun``: each takes its part of every batch, and all do the same step.

The processes hold the same network and read the same batches. The gradient is the sum over the ranks, each weighted by
its number of samples. So unequal parts, or a rank without samples, still give the gradient of the whole batch.
"""

import atexit
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from datetime import timedelta
from itertools import chain
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.data.distributed import DistributedSampler

from shaver.batches import batch_size_of
from shaver.curvature.capture import take
from shaver.ranks import ALONE, Ranks
from shaver.training.randomness import random_state, set_random_state


def join(device: torch.device) -> Ranks:
    """The ranks of the default process group. It is created if ``torchrun`` started this process."""
    if not dist.is_available():
        return ALONE
    if not dist.is_initialized():
        if not (dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1):
            return ALONE
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_leave)
    return Ranks(dist.group.WORLD) if dist.get_world_size() > 1 else ALONE


def _leave() -> None:
    """At the end of the process: wait briefly for the other ranks, so that none loses its connection."""
    if dist.is_initialized():
        with suppress(RuntimeError):  # a rank has ended already, or is still busy
            if dist.get_backend() == "gloo":
                dist.monitored_barrier(timeout=timedelta(seconds=5))
        dist.destroy_process_group()


def refuse_wrapped(model: nn.Module) -> None:
    """Refuse wrapped networks and sharded parameters: ``fit`` distributes the network itself."""
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise TypeError(
            f"fit distributes the network over the processes of torchrun itself: pass the plain network instead of "
            f"{type(model).__name__}, or use shaver.SpaM in your own loop."
        )
    if any(hasattr(p, "placements") for p in model.parameters()):
        raise TypeError("fit does not train sharded parameters; with FSDP, use shaver.SpaM in your own loop.")


class Spread:
    """Keeps the ranks of a run together. With a single process it does nothing."""

    def __init__(self, ranks: Ranks, model: nn.Module) -> None:
        self.ranks, self.model = ranks, model
        ranks.copy_([*model.parameters(), *model.buffers()])  # all ranks start with the weights of the first

    @property
    def first(self) -> bool:
        """Whether this rank writes files and shows progress."""
        return self.ranks.rank == 0

    def own(self, batches: Iterable[Any]) -> Iterator[Any]:
        """This rank's part of each batch; ``None`` for an empty part.

        All ranks take over the random state of the first rank, so that shuffled batches are the same on all ranks.
        """
        if self.ranks:
            set_random_state(self.ranks.share(random_state()))
        if not self.ranks or _is_sharded(batches):
            yield from batches
            return
        for batch in batches:
            size = batch_size_of(batch)
            low, high = (size * r // self.ranks.size for r in (self.ranks.rank, self.ranks.rank + 1))
            part = take(batch, slice(low, high))
            if batch_size_of(part) != high - low:
                raise TypeError(
                    f"a batch of type {type(batch).__name__} cannot be split between {self.ranks.size} processes; use "
                    "tuples or dicts of tensors, or a DataLoader with a DistributedSampler."
                )
            yield part if high > low else None

    def draws(self, groups: Iterator[Any], seed: int, epoch: int) -> Iterator[Any]:
        """The batches of an epoch. Random numbers drawn after the order of batches (dropout) differ between ranks."""
        if not self.ranks:
            return groups
        first = next(groups, None)  # a sampler draws its order with the first batch
        if not self.first:
            (own,) = np.random.SeedSequence([seed, epoch, self.ranks.rank]).generate_state(1, np.uint64)
            torch.manual_seed(int(own))
        return groups if first is None else chain([first], groups)

    def gather(self, loss: float, size: int, error: Exception | None) -> tuple[float, int]:
        """Sum the gradients (in place), the loss and the number of samples over the ranks, or stop on all ranks.

        Args:
            loss: This rank's loss, summed over its samples. The gradients are those of the mean.
            size: This rank's number of samples.
            error: The error in this rank's passes, or None.
        """
        if not self.ranks:
            if error is not None:
                raise error
            return loss, size
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        with_gradient = [p.grad is not None for p in parameters]
        failed, total, seen, *anywhere = self.ranks.total(error is not None, loss, size, *with_gradient)
        if error is not None:
            raise error
        if failed:
            raise RuntimeError("another rank stopped with an error, which it reports itself.")
        if not seen:
            raise ValueError("train has an empty batch.")
        gradients: list[Tensor] = []
        for p, has in zip(parameters, anywhere, strict=True):
            if has:
                p.grad = torch.zeros_like(p) if p.grad is None else p.grad
                gradients.append(p.grad)
        if gradients:
            torch._foreach_mul_(gradients, size / seen)
        self.ranks.sum_(gradients)
        return total, int(seen)

    def even_buffers(self) -> None:
        """Average the running statistics over the ranks; counters are equal already."""
        if self.ranks:
            floating = [b for b in self.model.buffers() if b.is_floating_point()]
            self.ranks.sum_(floating)
            for buffer in floating:
                buffer.div_(self.ranks.size)

    def check_same_epoch(self, epoch: int, folder: object) -> None:
        """Check that all ranks have read the same checkpoint, as machines that share a file system do."""
        (total,) = self.ranks.total(epoch)
        if total != epoch * self.ranks.size:
            raise ValueError(
                f"the ranks found different checkpoints in {folder} (here epoch {epoch}, {total / self.ranks.size:g} "
                "on average): the folder must be on a file system that all of them share."
            )


def _is_sharded(batches: Iterable[Any]) -> bool:
    """Whether a loader already gives each rank its own samples."""
    sampler = getattr(batches, "sampler", None)
    inner = getattr(getattr(batches, "batch_sampler", None), "sampler", None)
    return isinstance(sampler, DistributedSampler) or isinstance(inner, DistributedSampler)
