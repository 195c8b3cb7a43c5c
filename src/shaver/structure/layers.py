"""What a layer reads and what it makes: the dimensions of its tensors that lie along its input and output channels."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from shaver.criteria.prunable_weights import is_transposed_linear
from shaver.structure.groups import Group, Slice

#: A dimension of a parameter or buffer: its qualified name and the dimension's number.
Axis = tuple[str, int]

Sort = Literal["dense", "grouped", "norm"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm)
_INSTANCE_NORMS = {nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}


#: Why a layer with a parametrization is in no group.
COMPUTED = (
    "its weight is computed from other tensors (weight_norm, torch.nn.utils.prune, a parametrization); make it a plain "
    "parameter first, with torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm or prune.remove"
)


class ComputedWeight(LookupError):
    """A layer's tensor is neither a parameter nor a buffer of the model."""


@dataclass(frozen=True, eq=False)
class Layer:
    """A layer of a model as a function from input channels to output channels."""

    name: str  # qualified name of the module
    module: nn.Module
    # "dense": every output depends on every input. "grouped": a convolution with groups (depthwise
    # included), whose channels stay within their group. "norm": a norm or PReLU with parameters or statistics
    # per channel.
    sort: Sort
    makes: tuple[Axis, ...]  # dimensions that lie along the output channels
    reads: tuple[Axis, ...] = ()  # dimensions that lie along the input channels (dense layers)
    input_dim: int = -1  # the channel dimension of the input
    output_dim: int = -1  # the channel dimension of the output
    width: int = 0  # number of output channels
    groups: int = 1  # number of groups of a grouped convolution
    convolution: bool = False  # whether the channels are those of a feature map


def layer_of(name: str, module: nn.Module, names: dict[int, str]) -> Layer | None:
    """Describe a module as a layer; None for a container or an unknown type.

    ``names`` maps the ``id`` of a parameter or buffer to its name, so that a tied tensor has one name. A tensor that is
    computed from others raises :class:`ComputedWeight`: it has no dimension that could be sliced.
    """

    def axes(*pairs: tuple[Tensor | None, int]) -> tuple[Axis, ...]:
        return tuple((_name_in(names, tensor), dim) for tensor, dim in pairs if tensor is not None)

    if isinstance(module, nn.MultiheadAttention):
        projections = (module.in_proj_weight, module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        return Layer(
            name,
            module,
            "dense",
            makes=axes((module.out_proj.weight, 0), (module.out_proj.bias, 0)),
            reads=axes(*((weight, 1) for weight in projections)),
            width=module.embed_dim,
        )
    if isinstance(module, nn.Linear):
        makes = axes((module.weight, 0), (module.bias, 0))
        return Layer(name, module, "dense", makes, axes((module.weight, 1)), width=module.out_features)
    if is_transposed_linear(module):
        weight, bias = getattr(module, "weight"), getattr(module, "bias", None)  # noqa: B009
        return Layer(name, module, "dense", axes((weight, 1), (bias, 0)), axes((weight, 0)), width=weight.shape[1])
    if isinstance(module, _CONVOLUTIONS + _TRANSPOSED):
        turned = isinstance(module, _TRANSPOSED)
        dim = -len(module.kernel_size) - 1
        options = {"input_dim": dim, "output_dim": dim, "width": module.out_channels, "convolution": True}
        if module.groups > 1:
            # The first dimension of the weight runs over the groups either way, so a group goes with its rows.
            makes = axes((module.weight, 0), (module.bias, 0))
            return Layer(name, module, "grouped", makes, groups=module.groups, **options)  # type: ignore[arg-type]
        makes = axes((module.weight, int(turned)), (module.bias, 0))
        reads = axes((module.weight, int(not turned)))
        return Layer(name, module, "dense", makes, reads, **options)  # type: ignore[arg-type]
    if isinstance(module, nn.Embedding):
        return Layer(name, module, "dense", axes((module.weight, 1)), width=module.embedding_dim)
    if isinstance(module, _BATCH_NORMS):
        affine = [(module.weight, 0), (module.bias, 0)]
        statistics = [(getattr(module, key, None), 0) for key in ("running_mean", "running_var")]
        return Layer(name, module, "norm", axes(*affine, *statistics), output_dim=1)
    for norm, spatial in _INSTANCE_NORMS.items():
        if isinstance(module, norm):
            tensors = [getattr(module, key) for key in ("weight", "bias", "running_mean", "running_var")]
            return Layer(name, module, "norm", axes(*((tensor, 0) for tensor in tensors)), output_dim=-spatial - 1)
    if isinstance(module, nn.PReLU) and module.num_parameters > 1:
        return Layer(name, module, "norm", axes((module.weight, 0)), output_dim=1)
    # Norms over the last dimension are left to the probes: a norm over the width of a head is shared by all heads.
    return None


def _name_in(names: dict[int, str], tensor: Tensor) -> str:
    if id(tensor) not in names:
        raise ComputedWeight
    return names[id(tensor)]


def tensor_names(model: nn.Module) -> dict[int, str]:
    """``id`` → qualified name of every parameter and buffer; a tied tensor has the first of its names."""
    names: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), name)
    return names


def layers_of(model: nn.Module) -> tuple[list[Layer], dict[str, str]]:
    """Every layer of a known type, in the order of the model's modules, and the layers that are left out, with why."""
    names = tensor_names(model)
    inside = {id(child) for attention in model.modules() if isinstance(attention, nn.MultiheadAttention)
              for child in attention.children()}  # fmt: skip
    layers, left_out = [], {}
    for name, module in model.named_modules():
        try:
            layer = layer_of(name, module, names) if id(module) not in inside else None
        except ComputedWeight:
            left_out[name] = COMPUTED
            continue
        if layer is not None:
            layers.append(layer)
    return layers, left_out


def packed_heads(model: nn.Module) -> dict[str, Group]:
    """One group of heads for each ``nn.MultiheadAttention`` with several, from its own attributes.

    The projections inside this module are not called as modules, so no probe can observe them.
    """
    names = tensor_names(model)
    groups = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.MultiheadAttention) or module.num_heads < 2:
            continue
        heads, width = module.num_heads, module.num_heads * module.head_dim
        columns = torch.arange(width).reshape(heads, -1)
        # Queries, keys and values are stacked in one weight, unless their inputs differ in width.
        rows = torch.cat([columns + part * width for part in range(3)], 1)
        separate = (module.q_proj_weight, module.k_proj_weight, module.v_proj_weight)
        pieces: list[tuple[Tensor | None, int, Tensor]] = [
            (module.in_proj_weight, 0, rows),
            *((weight, 0, columns) for weight in separate),
        ]
        # With add_bias_kv, each head has one more key and value.
        pieces += [(module.in_proj_bias, 0, rows), (module.bias_k, 2, columns), (module.bias_v, 2, columns)]
        try:
            slices = [Slice(_name_in(names, t), dim, index, "makes") for t, dim, index in pieces if t is not None]
            slices.append(Slice(_name_in(names, module.out_proj.weight), 1, columns, "reads"))
        except ComputedWeight:
            continue
        groups[name] = Group(name, "heads", heads, tuple(slices))
    return groups
