"""What a layer reads and what it makes: the dimensions of its tensors that lie along its input and output channels."""

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

#: A dimension of a parameter or buffer: qualified name and number.
Axis = tuple[str, int]

Sort = Literal["dense", "grouped", "norm"]

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, nn.GroupNorm)
_INSTANCE_NORMS = {nn.InstanceNorm1d: 1, nn.InstanceNorm2d: 2, nn.InstanceNorm3d: 3}


@dataclass(frozen=True, eq=False)
class Layer:
    """One layer of a model, seen as something that turns input channels into output channels.

    Attributes:
        name: Qualified name of the module.
        module: The module.
        sort: ``"dense"``: every output depends on every input. ``"grouped"``: a convolution with groups, depthwise
            among them, whose channels stay within their group. ``"norm"``: a norm (or PReLU) that has
            numbers of its own for each channel.
        makes: Dimensions that lie along the output channels.
        reads: Dimensions that lie along the input channels (dense layers).
        input_dim: Where the channels are in the input.
        output_dim: Where they are in the output.
        width: Number of output channels.
        groups: Of a grouped convolution.
        convolution: Whether the channels are those of a feature map.
    """

    name: str
    module: nn.Module
    sort: Sort
    makes: tuple[Axis, ...]
    reads: tuple[Axis, ...] = ()
    input_dim: int = -1
    output_dim: int = -1
    width: int = 0
    groups: int = 1
    convolution: bool = False


def layer_of(name: str, module: nn.Module, names: dict[int, str]) -> Layer | None:
    """The layer that a module is, or None for a container and for a type that is not known.

    Args:
        name: Of the module.
        module: To be described.
        names: ``id`` of a parameter or buffer → its qualified name, so that tied tensors have one name.
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
    # Norms over the last dimension are not here: one over the width of a head is shared by all heads.
    return None


def is_transposed_linear(module: nn.Module) -> bool:
    """Whether this is a ``Conv1D`` as in GPT-2: a linear layer that keeps its weight as (inputs, outputs)."""
    weight = getattr(module, "weight", None)
    return (
        type(module).__name__ == "Conv1D" and hasattr(module, "nf") and isinstance(weight, Tensor) and weight.ndim == 2
    )


def tensor_names(model: nn.Module) -> dict[int, str]:
    """``id`` → qualified name of every parameter and buffer; a tied tensor has the name it is met with first."""
    names: dict[int, str] = {}
    for name, tensor in [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]:
        names.setdefault(id(tensor), name)
    return names


def layers_of(model: nn.Module) -> list[Layer]:
    """Every layer of a known type, once, in the order of the model's modules."""
    names = tensor_names(model)
    inside = {id(child) for attention in model.modules() if isinstance(attention, nn.MultiheadAttention)
              for child in attention.children()}  # fmt: skip
    layers = []
    for name, module in model.named_modules():
        layer = layer_of(name, module, names) if id(module) not in inside else None
        if layer is not None:
            layers.append(layer)
    return layers
