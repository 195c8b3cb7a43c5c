"""What a layer reads and what it makes: the dimensions of its tensors that lie along its input and output channels."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from shaver.criteria.prunable_weights import is_transposed_linear
from shaver.structure.groups import Group, Slice, tensors_of

#: A dimension of a parameter or buffer: its qualified name and the dimension's number.
Axis = tuple[str, int]

Sort = Literal["dense", "grouped", "norm"]

#: Norms over maps, and the dimension of their channels.
_NORMS: dict[type[nn.Module], int] = {
    **dict.fromkeys((nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm, nn.PReLU), 1),
    **{nn.InstanceNorm1d: -2, nn.InstanceNorm2d: -3, nn.InstanceNorm3d: -4},
}

#: Why a layer with a parametrization is in no group.
COMPUTED = (
    "its weight is computed from other tensors (weight_norm, torch.nn.utils.prune, a parametrization); make it a plain "
    "parameter first, with torch.nn.utils.parametrize.remove_parametrizations, remove_weight_norm or prune.remove"
)


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


def layer_of(name: str, module: nn.Module, names: dict[int, str]) -> Layer | None:
    """Describe a module as a layer; None for a container or an unknown type.

    ``names`` maps the ``id`` of a parameter or buffer to its name, so that a tied tensor has one name. A tensor that is
    computed from others raises a ``KeyError``: it has no dimension that could be sliced.
    """

    def axes(*pairs: tuple[Tensor | None, int]) -> tuple[Axis, ...]:
        return tuple((names[id(tensor)], dim) for tensor, dim in pairs if tensor is not None)

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
    if isinstance(module, nn.modules.conv._ConvNd):
        dim = -len(module.kernel_size) - 1
        if module.groups > 1:
            # The first dimension of the weight runs over the groups either way, so a group goes with its rows.
            makes = axes((module.weight, 0), (module.bias, 0))
            return Layer(name, module, "grouped", makes, (), dim, dim, module.out_channels, module.groups)
        turned = isinstance(module, nn.modules.conv._ConvTransposeNd)
        makes, reads = axes((module.weight, int(turned)), (module.bias, 0)), axes((module.weight, int(not turned)))
        return Layer(name, module, "dense", makes, reads, dim, dim, module.out_channels)
    if isinstance(module, nn.Embedding):
        return Layer(name, module, "dense", axes((module.weight, 1)), width=module.embedding_dim)
    for norm, dim in _NORMS.items():
        if isinstance(module, norm) and getattr(module, "num_parameters", 0) != 1:  # one slope of a PReLU for all
            tensors = [getattr(module, key, None) for key in ("weight", "bias", "running_mean", "running_var")]
            return Layer(name, module, "norm", axes(*((tensor, 0) for tensor in tensors)), output_dim=dim)
    # Norms over the last dimension are left to the probes: a norm over the width of a head is shared by all heads.
    return None


def tensor_names(model: nn.Module) -> dict[int, str]:
    """``id`` → qualified name of every parameter and buffer; a tied tensor has the first of its names."""
    return {id(tensor): name for name, tensor in reversed(tensors_of(model).items())}


def layers_of(model: nn.Module) -> tuple[list[Layer], dict[str, str]]:
    """Every layer of a known type, in the order of the model's modules, and the layers that are left out, with why."""
    names = tensor_names(model)
    inside = {id(child) for attention in model.modules() if isinstance(attention, nn.MultiheadAttention)
              for child in attention.children()}  # fmt: skip
    layers, left_out = [], {}
    for name, module in model.named_modules():
        try:
            if id(module) not in inside and (layer := layer_of(name, module, names)) is not None:
                layers.append(layer)
        except KeyError:
            left_out[name] = COMPUTED
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
        pieces: list[tuple[Tensor | None, int, Tensor]] = [(module.in_proj_weight, 0, rows)]
        pieces += [(weight, 0, columns) for weight in separate]
        # With add_bias_kv, each head has one more key and value.
        pieces += [(module.in_proj_bias, 0, rows), (module.bias_k, 2, columns), (module.bias_v, 2, columns)]
        try:
            slices = [Slice(names[id(t)], dim, index, "makes") for t, dim, index in pieces if t is not None]
            slices.append(Slice(names[id(module.out_proj.weight)], 1, columns, "reads"))
        except KeyError:  # a weight that is computed from others
            continue
        groups[name] = Group(name, "heads", heads, tuple(slices))
    return groups
