"""One process among several that share the work: sums over ranks, and nothing at all where a process is alone."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shaver.shards import mesh_group

#: Tensors smaller than this many numbers travel together, in one message.
SMALL = 2**18
#: Numbers in one such message at most.
BUCKET = 2**22


class Ranks:
    """The processes whose samples make up one batch. ``Ranks()`` is a process on its own.

    Every method is a collective: all ranks call it, in the same order.

    Args:
        group: A process group, or None for a process on its own.

    Attributes:
        size: How many processes.
        rank: Which of them this is.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def __bool__(self) -> bool:
        """Whether there is anybody to talk to."""
        return self.size > 1

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks. Every rank gets the same bits."""
        if self:
            for message in _messages(tensors):
                dist.all_reduce(message.content, group=self.group)
                message.deliver()

    def copy_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by the first rank's."""
        if self:
            for message in _messages(tensors):
                dist.broadcast(message.content, group=self.group, group_src=0)
                message.deliver()

    def total(self, *numbers: float) -> list[float]:
        """Sums of numbers over the ranks, in double precision."""
        if not self:
            return list(numbers)
        packed = torch.tensor(numbers, dtype=torch.float64, device=self._device())
        dist.all_reduce(packed, group=self.group)
        return [float(number) for number in packed.tolist()]

    def range(self, least: float, most: float) -> tuple[float, float]:
        """The least of the one and the most of the other over the ranks."""
        if not self:
            return least, most
        packed = torch.tensor([least, -most], dtype=torch.float64, device=self._device())
        dist.all_reduce(packed, op=dist.ReduceOp.MIN, group=self.group)
        return float(packed[0]), -float(packed[1])

    def share(self, value: Any) -> Any:
        """The first rank's value (anything that can be pickled, between processes of one run) on every rank."""
        if not self:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0, device=self._device())
        return box[0]

    def wait(self) -> None:
        """Until every rank is here."""
        if self:
            dist.barrier(group=self.group)

    def _device(self) -> torch.device:
        backend = dist.get_backend(self.group)
        return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


#: A process on its own.
ALONE = Ranks()


def unwrapped(model: nn.Module) -> tuple[nn.Module, Ranks]:
    """The network inside ``DistributedDataParallel`` and the ranks that train it, also if they share its parameters.

    A plain network is alone.
    """
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.module
        assert isinstance(inner, nn.Module)
        return inner, Ranks(model.process_group)
    if isinstance(model, nn.DataParallel):
        raise TypeError(
            "torch.nn.DataParallel runs copies of the network that cannot be watched; use DistributedDataParallel "
            "under torchrun, or the plain network."
        )
    group = mesh_group(model)
    return model, ALONE if group is None else Ranks(group)


class _Message:
    """One tensor, or several small ones side by side."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        alone = len(tensors) == 1 and tensors[0].is_contiguous()
        self.content = tensors[0] if alone else torch.cat([t.detach().reshape(-1) for t in tensors])

    @torch.no_grad()
    def deliver(self) -> None:
        """Write what came back into the tensors."""
        if self.content is self.tensors[0]:
            return
        parts = torch.split(self.content, [t.numel() for t in self.tensors])
        for tensor, part in zip(self.tensors, parts, strict=True):
            tensor.copy_(part.view(tensor.shape))


def _messages(tensors: Sequence[Tensor]) -> Iterator[_Message]:
    waiting: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() >= SMALL:
            yield _Message([tensor.detach()])
            continue
        kind = waiting.setdefault((tensor.dtype, tensor.device), [])
        kind.append(tensor.detach())
        if sum(t.numel() for t in kind) >= BUCKET:
            yield _Message(kind)
            waiting[tensor.dtype, tensor.device] = []
    for kind in waiting.values():
        if kind:
            yield _Message(kind)
