"""Several processes that train together: sums over the ranks, and the part of the parameters that each rank holds."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shaver.naming import shown
from shaver.shards import is_sharded, joined, local, rows_of

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
        if group is not None and not isinstance(group, dist.ProcessGroup):
            raise TypeError(f"group is a torch.distributed process group, not {shown(group)}.")
        self.group = group
        self.size = 1 if group is None else dist.get_world_size(group)
        self.rank = 0 if group is None else dist.get_rank(group)

    def __bool__(self) -> bool:
        """Whether there is more than one process."""
        return self.size > 1

    def sum_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by its sum over the ranks. Every rank gets the same bits."""
        if self:
            _send(tensors, lambda content: dist.all_reduce(content, group=self.group))

    def copy_(self, tensors: Sequence[Tensor]) -> None:
        """Replace each tensor by the first rank's."""
        if self:
            _send(tensors, lambda content: dist.broadcast(content, group=self.group, group_src=0))

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

    Raises:
        TypeError: It is no network, or ``torch.nn.DataParallel``.
        ValueError: Only some parameters are sharded, or they are sharded over several meshes or mesh dimensions.
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
    trained = [p for p in model.parameters() if p.requires_grad]
    sharded: list[Any] = [p for p in trained if is_sharded(p)]
    if not sharded:
        return model, ALONE
    meshes = {p.device_mesh for p in sharded}
    if len(sharded) < len(trained) or len(meshes) > 1 or next(iter(meshes)).ndim > 1:
        raise ValueError(
            f"{len(sharded)} of {len(trained)} trainable parameters are sharded, over {len(meshes)} meshes of "
            f"{sorted(mesh.ndim for mesh in meshes)} dimensions; SpaM needs all of them on one mesh of one dimension: "
            "call fully_shard(model) on the whole model, without replication or tensor parallelism."
        )
    return model, Ranks(meshes.pop().get_group())


class HeldParameters:
    """Parameters that every rank holds whole. Squares are summed over the ranks at the end of a step."""

    #: Whether each rank holds only some rows. If so, :meth:`own` and :meth:`total` are collectives.
    is_sharded = False

    def __init__(self, parameters: Mapping[str, Tensor], ranks: Ranks) -> None:
        self.parameters, self.ranks = dict(parameters), ranks

    def rows(self) -> dict[str, Tensor]:
        """The values of the parameters that this rank holds."""
        return dict(self.parameters)

    def zeros(self, name: str) -> Tensor:
        """Zeros shaped like this rank's values of a parameter, in at least single precision."""
        rows = local(self.parameters[name].detach())
        return torch.zeros_like(rows, dtype=torch.promote_types(rows.dtype, torch.float32))

    def own(self, name: str, squares: Tensor) -> Tensor:
        """This rank's part of a parameter's squares."""
        return squares

    def total(self, *sums: float) -> list[float]:
        """Sums over all values, from sums over the values that this rank holds."""
        return list(sums)

    def gather(self, sums: dict[str, Tensor], unit: float, loss: str, count: int) -> None:
        """Replace this rank's sums of squares by those of all ranks, divided by ``unit``. A collective."""
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
        from torch.distributed.tensor import DTensor, Partial

        like: Any = self.parameters[name]
        partial: Any = DTensor.from_local(squares, like.device_mesh, [Partial()])
        return local(partial.redistribute(placements=like.placements))

    def total(self, *sums: float) -> list[float]:
        """Sums over all ranks. A collective."""
        return self.ranks.total(*sums)

    def gather(self, sums: dict[str, Tensor], unit: float, loss: str, count: int) -> None:
        """Divide by ``unit``. The sums are over all ranks already, so all ranks need the same unit."""
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
        sharded: list[Any] = list(self.parameters.values())
        if wrong := [p.placements[0] for p in sharded if not p.placements[0].is_shard(0)]:
            raise ValueError(
                f'a parameter is sharded as {wrong[0]}; priors other than "parameter" need Shard(0), the default of '
                "fully_shard."
            )
        rows = {name: rows_of(torch.arange(len(p)), p) for name, p in self.parameters.items()}
        return prior.of_rows(rows, self.ranks)

    def decide_together(self, values: Sequence[Tensor]) -> None:
        """Do nothing: each rank decides about its own rows."""


def held_parameters(parameters: Mapping[str, Tensor], ranks: Ranks) -> HeldParameters:
    """The adapter for these parameters: whole on every rank, or sharded."""
    kind = ShardedParameters if any(is_sharded(p) for p in parameters.values()) else HeldParameters
    return kind(parameters, ranks)


@torch.no_grad()
def _send(tensors: Sequence[Tensor], collective: Callable[[Tensor], object]) -> None:
    """Pass the tensors to an in-place collective; small ones of one kind are concatenated."""
    waiting: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}

    def send(message: list[Tensor]) -> None:
        if len(message) == 1 and message[0].is_contiguous():
            collective(message[0])
            return
        content = torch.cat([tensor.reshape(-1) for tensor in message])
        collective(content)
        for tensor, part in zip(message, torch.split(content, [t.numel() for t in message]), strict=True):
            tensor.copy_(part.view(tensor.shape))

    for tensor in (tensor.detach() for tensor in tensors):
        if tensor.numel() >= SMALL:
            send([tensor])
            continue
        message = waiting.setdefault((tensor.dtype, tensor.device), [])
        message.append(tensor)
        if sum(t.numel() for t in message) >= BUCKET:
            send(waiting.pop((tensor.dtype, tensor.device)))
    for message in waiting.values():
        send(message)
