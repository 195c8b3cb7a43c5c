"""``fit`` in several processes under ``torchrun``: each takes its part of every batch, and all do the same step.

The processes hold the same network and read the same batches. A gradient is the sum of the ranks' own, each weighed
by its samples, so that parts of unequal size, or a rank with none, give the gradient of the whole batch.
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
    """The ranks of this run: those of the default process group, which is made if ``torchrun`` started this process."""
    if not dist.is_available():
        return ALONE
    if not dist.is_initialized():
        if not (dist.is_torchelastic_launched() and int(os.environ.get("WORLD_SIZE", "1")) > 1):
            return ALONE
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
        atexit.register(_leave)
    return Ranks(dist.group.WORLD) if dist.get_world_size() > 1 else ALONE


def _leave() -> None:
    """At the end of the process: wait a moment for the others, so that no rank pulls the connection from another."""
    if dist.is_initialized():
        with suppress(RuntimeError):  # a rank that is gone already, or still busy
            if dist.get_backend() == "gloo":
                dist.monitored_barrier(timeout=timedelta(seconds=5))
        dist.destroy_process_group()


def refuse_wrapped(model: nn.Module) -> None:
    """``fit`` spreads the network itself, and a wrapper would do it a second time.

    Raises:
        TypeError: The model is wrapped, or its parameters are sharded.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise TypeError(
            f"fit spreads the network over the processes of torchrun itself: pass the plain network instead of "
            f"{type(model).__name__}, or use shaver.SpaM in a loop of your own."
        )
    if any(hasattr(p, "placements") for p in model.parameters()):
        raise TypeError("fit does not train sharded parameters; use shaver.SpaM in a loop of your own under FSDP.")


class Spread:
    """Makes the processes of a run act as one; does nothing if there is only one."""

    def __init__(self, ranks: Ranks, model: nn.Module) -> None:
        self.ranks, self.model = ranks, model
        ranks.copy_([*model.parameters(), *model.buffers()])  # all ranks start from the weights of the first

    @property
    def first(self) -> bool:
        """Whether this rank is the one that writes and shows."""
        return self.ranks.rank == 0

    def own(self, batches: Iterable[Any]) -> Iterator[Any]:
        """This rank's part of each batch; a part may be empty, which is ``None``.

        All ranks draw from the first one's random numbers here, so that shuffled batches are the same on all.
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
        """An epoch's batches; what is drawn after their order (dropout) is each rank's own."""
        if not self.ranks:
            return groups
        first = next(groups, None)  # a sampler draws its order with the first batch
        if not self.first:
            (own,) = np.random.SeedSequence([seed, epoch, self.ranks.rank]).generate_state(1, np.uint64)
            torch.manual_seed(int(own))
        return groups if first is None else chain([first], groups)

    def gather(self, loss: float, size: int, error: Exception | None) -> tuple[float, int]:
        """Sum the gradients in place, and the loss and the number of samples; or stop on all ranks.

        Args:
            loss: This rank's summed loss, of which the gradients' loss is the mean.
            size: Its number of samples.
            error: What went wrong in its passes.
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
            raise ValueError("train gave an empty batch.")
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
        """Running statistics become the mean of the ranks' own; counters are the same anyway."""
        if self.ranks:
            floating = [b for b in self.model.buffers() if b.is_floating_point()]
            self.ranks.sum_(floating)
            for buffer in floating:
                buffer.div_(self.ranks.size)

    def check_same_epoch(self, epoch: int, folder: object) -> None:
        """All ranks have read the same checkpoint.

        Raises:
            ValueError: They have not, which happens on several machines without a common file system.
        """
        (total,) = self.ranks.total(epoch)
        if total != epoch * self.ranks.size:
            raise ValueError(
                f"the ranks found different checkpoints in {folder} (here epoch {epoch}, {total / self.ranks.size:g} "
                "on average): it must be on a file system that all of them see."
            )


def _is_sharded(batches: Iterable[Any]) -> bool:
    """A loader that gives each rank its own samples already."""
    sampler = getattr(batches, "sampler", None)
    inner = getattr(getattr(batches, "batch_sampler", None), "sampler", None)
    return isinstance(sampler, DistributedSampler) or isinstance(inner, DistributedSampler)
