"""One process among several that share the work: sums over ranks, and what each rank holds of the parameters."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shaver.shards import is_sharded, joined, local, mesh_group, row_numbers, rows_of, scattered, zeros_for

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
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not a {type(model).__name__}.")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.module
        assert isinstance(inner, nn.Module)
        return inner, Ranks(model.process_group)
    if isinstance(model, nn.DataParallel):
        raise TypeError(
            "torch.nn.DataParallel runs copies of the network that cannot be measured; use DistributedDataParallel "
            "under torchrun, or the plain network."
        )
    group = mesh_group(model)
    return model, ALONE if group is None else Ranks(group)


class HeldParameters:
    """What a rank holds of each parameter, here all of it: squares are summed over the ranks at the end of a step.

    Args:
        parameters: The trainable parameters, by name.
        ranks: The processes that train them.
    """

    #: Whether each rank holds some rows only. Adding squares and totals are collectives then.
    is_sharded = False

    def __init__(self, parameters: Mapping[str, Tensor], ranks: Ranks) -> None:
        self.parameters, self.ranks = dict(parameters), ranks

    def rows(self) -> dict[str, Tensor]:
        """The parameters' values that this rank holds."""
        return dict(self.parameters)

    def zeros(self, name: str) -> Tensor:
        """Zeros for those of one parameter, in at least single precision."""
        return zeros_for(self.parameters[name])

    def own(self, name: str, squares: Tensor) -> Tensor:
        """What this rank keeps of a parameter's squares."""
        return squares

    def total(self, *sums: float) -> list[float]:
        """Sums over the values that this rank holds, as sums over all values."""
        return list(sums)

    def gather(self, sums: dict[str, Tensor], unit: float, loss: str, count: int) -> None:
        """Replace this rank's sums of squares by those of all ranks, divided by ``unit``. A collective.

        Args:
            sums: By parameter name.
            unit: What a square counts on this rank.
            loss: The loss's reduction, for the message.
            count: This rank's samples, likewise.
        """
        self._divide(sums, unit)
        self.ranks.sum_([sums[name] for name in self.parameters])

    def _divide(self, sums: dict[str, Tensor], unit: float) -> None:
        for name in self.parameters:
            zeros = self.zeros(name)
            sums[name] = sums[name].div_(unit).to(zeros.dtype) if name in sums else zeros

    def prior_of(self, prior: Any, for_rows: bool) -> Any:
        """A prior made for this rank: unchanged, because it holds everything."""
        return prior

    def decide_together(self, values: Sequence[Tensor]) -> None:
        """Make the first rank's values everybody's."""
        self.ranks.copy_(values)

    def saved(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values by parameter name, for a state dict."""
        return {name: joined(value, self.parameters[name]) for name, value in values.items()}

    def loaded(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """What :meth:`saved` gave, back on this rank."""
        rows = {name: rows_of(value, self.parameters[name]) for name, value in values.items()}
        return {name: value.to(self.parameters[name].device, copy=True) for name, value in rows.items()}


class ShardedParameters(HeldParameters):
    """Some rows of each parameter (FSDP2): squares are summed and scattered as each layer's gradient arrives."""

    is_sharded = True

    def rows(self) -> dict[str, Tensor]:
        """This rank's rows, sharing their memory."""
        return {name: local(p) for name, p in self.parameters.items()}

    def own(self, name: str, squares: Tensor) -> Tensor:
        """This rank's rows of the sum of all ranks' squares. A collective."""
        return scattered(squares, self.parameters[name])

    def total(self, *sums: float) -> list[float]:
        """Sums over all ranks. A collective."""
        return self.ranks.total(*sums)

    def gather(self, sums: dict[str, Tensor], unit: float, loss: str, count: int) -> None:
        """The sums are those of all ranks already, so that one unit has to be right for all.

        Raises:
            ValueError: The ranks have different numbers of samples, and the loss is a mean over each one's own.
        """
        (total,) = self.ranks.total(unit)
        if not math.isclose(total, unit * self.ranks.size, rel_tol=1e-9):
            raise ValueError(
                f'with sharded parameters loss="{loss}" needs as many samples on every rank ({count} here); use '
                'loss="auto".'
            )
        self._divide(sums, unit)

    def prior_of(self, prior: Any, for_rows: bool) -> Any:
        """The prior of this rank's rows; one that was made for them is it already."""
        if for_rows:
            return prior
        return prior.of_rows({name: row_numbers(p) for name, p in self.parameters.items()}, self.ranks)

    def decide_together(self, values: Sequence[Tensor]) -> None:
        """Nothing: each rank decides on its own rows."""


def held_parameters(parameters: Mapping[str, Tensor], ranks: Ranks) -> HeldParameters:
    """What this rank holds of some parameters."""
    kind = ShardedParameters if any(is_sharded(p) for p in parameters.values()) else HeldParameters
    return kind(parameters, ranks)


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
