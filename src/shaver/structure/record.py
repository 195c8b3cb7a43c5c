"""What was removed from a network: enough to remove the same from a fresh one of the original shapes."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from shaver.criteria.prunable_weights import is_transposed_linear
from shaver.selection import Selection, take
from shaver.structure.groups import Groups, Kept, remaining, tensors_of
from shaver.structure.surgery import adjust
from shaver.structure.transformers_models import refit_adapters, refit_config

#: Where a compact network keeps its record: an ordinary attribute, so that copies of the network have it too.
_ATTRIBUTE = "shaver_removed"


@dataclass(frozen=True, eq=False)
class RemovalRecord:
    """Which positions of which tensors stayed, relative to the network as its constructor builds it.

    Attributes:
        shapes: Tensor → its original shape; only tensors that lost something.
        kept: Tensor → dimension → the positions that stayed.
        biases: Biases that were added to layers without one, to take up constants.
    """

    shapes: Mapping[str, torch.Size] = field(default_factory=dict)
    kept: Selection = field(default_factory=dict)
    biases: tuple[str, ...] = ()

    def then(self, later: "RemovalRecord") -> "RemovalRecord":
        """This record followed by a later one, as one record from the original network."""
        shapes = {name: self.shapes.get(name, shape) for name, shape in later.shapes.items()}
        kept: dict[str, dict[int, Tensor]] = {name: dict(dims) for name, dims in self.kept.items()}
        for name, dims in later.kept.items():
            mine = kept.setdefault(name, {})
            for dim, positions in dims.items():
                mine[dim] = mine[dim][positions] if dim in mine else positions
        for name in set(self.biases) & set(kept):  # added by this record, so not in the original network
            del kept[name]
            del shapes[name]
        return RemovalRecord({**self.shapes, **shapes}, kept, tuple(dict.fromkeys((*self.biases, *later.biases))))

    def under(self, prefix: str) -> "RemovalRecord":
        """The same record for a network that contains this one as the submodule ``prefix``."""
        at = f"{prefix}." if prefix else ""
        return RemovalRecord(
            {at + name: shape for name, shape in self.shapes.items()},
            {at + name: dims for name, dims in self.kept.items()},
            tuple(at + name for name in self.biases),
        )

    def to_json(self) -> dict[str, Any]:
        """Plain values: ``{"conv1.weight": {"shape": [6, 1, 5, 5], "kept": {"0": "0-2,5"}}, …}``."""
        tensors = {
            name: {
                "shape": list(self.shapes[name]),
                "kept": {str(dim): _to_ranges(positions) for dim, positions in sorted(dims.items())},
            }
            for name, dims in self.kept.items()
        }
        return {"tensors": tensors, "biases": list(self.biases)}

    @classmethod
    def from_json(cls, value: Any) -> "RemovalRecord":
        """Read :meth:`to_json` back.

        Raises:
            ValueError: It is not such a value, or a position lies outside its tensor.
        """
        try:
            shapes = {name: torch.Size(map(int, entry["shape"])) for name, entry in value["tensors"].items()}
            kept = {
                name: {int(dim): _from_ranges(text) for dim, text in entry["kept"].items()}
                for name, entry in value["tensors"].items()
            }
            biases = tuple(map(str, value["biases"]))
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            raise ValueError(f"the record of what was removed is damaged: {error!r}.") from error
        for name, dims in kept.items():
            for dim, positions in dims.items():
                if not 0 <= dim < len(shapes[name]) or not len(positions) or int(positions[-1]) >= shapes[name][dim]:
                    raise ValueError(f"the record of what was removed is damaged at {name!r}, dimension {dim}.")
        return cls(shapes, kept, biases)


def record_of(model: nn.Module, groups: Groups, kept: Kept) -> RemovalRecord:
    """The record of a removal that keeps these units."""
    tensors = tensors_of(model)
    sizes = {name: tensor.shape for name, tensor in tensors.items()}
    selection = under_all_names(tensors, remaining(groups, kept, sizes))
    return RemovalRecord({name: sizes[name] for name in selection}, selection)


def removal_record(model: nn.Module) -> RemovalRecord | None:
    """What was removed from a network, or from submodules of it; None for one that is whole."""
    total: RemovalRecord | None = None
    for name, module in reversed(list(model.named_modules())):  # a part that was compacted before it became one first
        if _ATTRIBUTE in vars(module):
            record = vars(module)[_ATTRIBUTE].under(name)
            total = record if total is None else total.then(record)
    return total


def shapes_after(model: nn.Module, record: RemovalRecord) -> dict[str, tuple[torch.Size, torch.dtype]]:
    """Names, shapes and types of a network's state after the removal; the network is not changed."""
    tensors = tensors_of(model)
    expanded = under_all_names(tensors, record.kept)
    found = {}
    for name, tensor in model.state_dict().items():
        left = expanded.get(name, {})
        sizes = [len(left[dim]) if dim in left else size for dim, size in enumerate(tensor.shape)]
        found[name] = (torch.Size(sizes), tensor.dtype)
    for name, shape in record.shapes.items():
        if name not in tensors:
            raise ValueError(f"the record removes part of {name!r}, which {type(model).__name__} does not have.")
        if tensors[name].shape != shape:
            raise ValueError(
                f"the record removes part of {name!r} of shape {tuple(shape)}; in {type(model).__name__} it has shape "
                f"{tuple(tensors[name].shape)}."
            )
    for name in record.biases:
        weight = weight_beside(name)
        if weight not in found or tensors.get(name) is not None:
            raise ValueError(f"the record adds {name!r}, which does not fit {type(model).__name__}.")
        owner = model.get_submodule(name.rpartition(".")[0])
        found[name] = (torch.Size([found[weight][0][output_dim(owner)]]), found[weight][1])
    return found


def resize(model: nn.Module, record: RemovalRecord) -> None:
    """Remove from a network, in place, what the record says; new biases are zero, and the network keeps the record.

    Parameters stay the same objects, so that optimizers and hooks that hold them stay valid; gradients are sliced too.
    """
    shapes_after(model, record)
    tensors = tensors_of(model)
    kept = under_all_names(tensors, record.kept)
    for tensor, name in {tensors[name]: name for name in kept}.items():  # a tied tensor once
        gradient = tensor.grad if tensor.is_leaf else None
        tensor.grad = None
        _replace(tensor, take(tensor.detach(), kept[name]))
        if gradient is not None:
            tensor.grad = take(gradient, kept[name])
    adjust(model, kept)
    for name in record.biases:
        owner = model.get_submodule(name.rpartition(".")[0])
        weight = owner.weight
        assert isinstance(weight, Tensor)
        zeros = torch.zeros(weight.shape[output_dim(owner)], dtype=weight.dtype, device=weight.device)
        owner.register_parameter("bias", nn.Parameter(zeros, requires_grad=weight.requires_grad))
    refit_config(model, record.shapes, record.kept)
    refit_adapters(model)
    earlier = vars(model).get(_ATTRIBUTE)
    setattr(model, _ATTRIBUTE, record if earlier is None else earlier.then(record))


def output_dim(layer: nn.Module) -> int:
    """The dimension of a layer's weight along which its outputs lie."""
    return 1 if isinstance(layer, nn.modules.conv._ConvTransposeNd) or is_transposed_linear(layer) else 0


def weight_beside(bias: str) -> str:
    """The name of the weight in the layer of a bias."""
    return bias.removesuffix("bias") + "weight"


def _replace(tensor: Tensor, values: Tensor) -> None:
    """Give a tensor other contents of another shape, and make autograd forget the old one.

    A graph that is still alive (a loss that somebody kept) holds the node that accumulates into the parameter, with
    its old shape. Autograd makes a new node when the type changes, so it is changed on the way.
    """
    other = torch.float32 if tensor.dtype == torch.float64 else torch.float64
    if tensor.is_floating_point():
        tensor.data = torch.empty(0, dtype=other, device=tensor.device)
    tensor.data = values


def under_all_names(tensors: Mapping[str, Tensor], kept: Selection) -> dict[str, dict[int, Tensor]]:
    """What stays of each tensor, by each of its names; a tied tensor keeps what all of its names keep."""
    by_tensor: dict[int, dict[int, Tensor]] = {}
    for name, dims in kept.items():
        if name not in tensors:
            continue
        merged = by_tensor.setdefault(id(tensors[name]), {})
        for dim, positions in dims.items():
            if dim in merged:
                positions = positions[torch.isin(positions, merged[dim])]
            merged[dim] = positions
    return {name: by_tensor[id(tensor)] for name, tensor in tensors.items() if id(tensor) in by_tensor}


def _to_ranges(positions: Tensor) -> str:
    breaks = (positions.diff() != 1).nonzero().flatten() + 1
    runs = [run.tolist() for run in positions.tensor_split(breaks.tolist())]
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs)


def _from_ranges(text: str) -> Tensor:
    positions: list[int] = []
    for run in text.split(","):
        first, _, last = run.partition("-")
        positions.extend(range(int(first), int(last or first) + 1))
    if any(b <= a for a, b in pairwise(positions)):
        raise ValueError(f"positions {text!r} do not ascend")
    return torch.tensor(positions, dtype=torch.int64)
