"""Several processes that train together: sums over the ranks, and the part of the parameters that each rank holds."""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shaver.shards import is_sharded, joined, local, mesh_group, row_numbers, rows_of, scattered, zeros_for

#: Tensors with fewer elements than this are sent together, in one message.
SMALL = 2**18
#: The largest number of elements in such a message.
BUCKET = 2**22


class Ranks:
    """The processes whose samples make up one batch. ``Ranks()`` is a single process.

    Every method is a collective: all ranks must call it, in the same order.

    Args:
        group: A process group, or None for a single process.

    Attributes:
        size: Number of processes.
        rank: Index of this process.
    """

    def __init__(self, group: Any = None) -> None:
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def __bool__(self) -> bool:
        """Whether there is more than one process."""
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
        """The minimum of ``least`` and the maximum of ``most`` over the ranks."""
        if not self:
            return least, most
        packed = torch.tensor([least, -most], dtype=torch.float64, device=self._device())
        dist.all_reduce(packed, op=dist.ReduceOp.MIN, group=self.group)
        return float(packed[0]), -float(packed[1])

    def share(self, value: Any) -> Any:
        """The first rank's value, on every rank. It is pickled between the processes of one run."""
        if not self:
            return value
        box = [value]
        dist.broadcast_object_list(box, group=self.group, group_src=0, device=self._device())
        return box[0]

    def wait(self) -> None:
        """Wait until every rank has called this."""
        if self:
            dist.barrier(group=self.group)

    def _device(self) -> torch.device:
        backend = dist.get_backend(self.group)
        return torch.device("cuda", torch.cuda.current_device()) if backend == "nccl" else torch.device("cpu")


#: A single process.
ALONE = Ranks()


def unwrapped(model: nn.Module) -> tuple[nn.Module, Ranks]:
    """The network inside ``DistributedDataParallel``, and the ranks that train it, also if it is sharded over them.

    A plain network is returned with ``ALONE``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"the model must be a torch.nn.Module, not a {type(model).__name__}.")
    if isinstance(model, nn.parallel.DistributedDataParallel):
        inner = model.module
        assert isinstance(inner, nn.Module)
        return inner, Ranks(model.process_group)
    if isinstance(model, nn.DataParallel):
        raise TypeError(
            "torch.nn.DataParallel runs copies of the network, whose curvature cannot be measured; use "
            "DistributedDataParallel under torchrun, or the plain network."
        )
    group = mesh_group(model)
    return model, ALONE if group is None else Ranks(group)


class HeldParameters:
    """Parameters that every rank holds whole. Squares are summed over the ranks at the end of a step.

    Args:
        parameters: The trainable parameters, by name.
        ranks: The processes that train them.
    """

    #: Whether each rank holds only some rows. If so, :meth:`own` and :meth:`total` are collectives.
    is_sharded = False

    def __init__(self, parameters: Mapping[str, Tensor], ranks: Ranks) -> None:
        self.parameters, self.ranks = dict(parameters), ranks

    def rows(self) -> dict[str, Tensor]:
        """The values of the parameters that this rank holds."""
        return dict(self.parameters)

    def zeros(self, name: str) -> Tensor:
        """Zeros shaped like this rank's values of a parameter, in at least single precision."""
        return zeros_for(self.parameters[name])

    def own(self, name: str, squares: Tensor) -> Tensor:
        """This rank's part of a parameter's squares."""
        return squares

    def total(self, *sums: float) -> list[float]:
        """Sums over all values, from sums over the values that this rank holds."""
        return list(sums)

    def gather(self, sums: dict[str, Tensor], unit: float, loss: str, count: int) -> None:
        """Replace this rank's sums of squares by those of all ranks, divided by ``unit``. A collective.

        Args:
            sums: By parameter name.
            unit: Scale of the squares on this rank.
            loss: Reduction of the loss, for the error message.
            count: Number of samples on this rank, for the error message.
        """
        self._divide(sums, unit)
        self.ranks.sum_([sums[name] for name in self.parameters])

    def _divide(self, sums: dict[str, Tensor], unit: float) -> None:
        for name in self.parameters:
            zeros = self.zeros(name)
            sums[name] = sums[name].div_(unit).to(zeros.dtype) if name in sums else zeros

    def prior_of(self, prior: Any, for_rows: bool) -> Any:
        """The prior for this rank's values: unchanged, because this rank holds all of them."""
        return prior

    def decide_together(self, values: Sequence[Tensor]) -> None:
        """Copy the first rank's values to every rank."""
        self.ranks.copy_(values)

    def saved(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Values by parameter name, for a state dict."""
        return {name: joined(value, self.parameters[name]) for name, value in values.items()}

    def loaded(self, values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """This rank's part of what :meth:`saved` returned."""
        rows = {name: rows_of(value, self.parameters[name]) for name, value in values.items()}
        return {name: value.to(self.parameters[name].device, copy=True) for name, value in rows.items()}


class ShardedParameters(HeldParameters):
    """Parameters of which each rank holds some rows (FSDP2). Squares are summed and scattered layer by layer."""

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
        """Divide by ``unit``. The sums are over all ranks already, so all ranks need the same unit.

        Raises:
            ValueError: The units differ: each rank's loss is a mean over a different number of samples.
        """
        (total,) = self.ranks.total(unit)
        if not math.isclose(total, unit * self.ranks.size, rel_tol=1e-9):
            raise ValueError(
                f'with sharded parameters loss="{loss}" needs the same number of samples on every rank ({count} on '
                'this one); use loss="auto".'
            )
        self._divide(sums, unit)

    def prior_of(self, prior: Any, for_rows: bool) -> Any:
        """The prior for this rank's rows; unchanged if it was made for them."""
        if for_rows:
            return prior
        return prior.of_rows({name: row_numbers(p) for name, p in self.parameters.items()}, self.ranks)

    def decide_together(self, values: Sequence[Tensor]) -> None:
        """Do nothing: each rank decides about its own rows."""


def held_parameters(parameters: Mapping[str, Tensor], ranks: Ranks) -> HeldParameters:
    """The adapter for these parameters: whole on every rank, or sharded."""
    kind = ShardedParameters if any(is_sharded(p) for p in parameters.values()) else HeldParameters
    return kind(parameters, ranks)


class _Message:
    """One tensor, or several small ones concatenated."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors
        alone = len(tensors) == 1 and tensors[0].is_contiguous()
        self.content = tensors[0] if alone else torch.cat([t.detach().reshape(-1) for t in tensors])

    @torch.no_grad()
    def deliver(self) -> None:
        """Write the received content into the tensors."""
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
