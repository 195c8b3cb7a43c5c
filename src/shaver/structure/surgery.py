"""What a module's attributes must say after its tensors were sliced: widths, channel and head counts, groups.

A rule is one function, found by the module's type. It runs after the slicing, children before their parents.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from shaver.selection import Dims, Selection
from shaver.structure.attention import SlimMultiheadAttention

#: ``rule(module, kept)``: ``kept`` has the module's own tensor names and those of its children, relative to it.
Surgery = Callable[[Any, Selection], None]

_RULES: dict[type[nn.Module] | str, Surgery] = {}


def register_surgery(*kinds: type[nn.Module] | str) -> Callable[[Surgery], Surgery]:
    """Teach compaction a module type that keeps a width in an attribute.

    Example:
        >>> class Scaled(nn.Module):
        ...     def __init__(self, width):
        ...         super().__init__()
        ...         self.width, self.weight = width, nn.Parameter(torch.ones(width))
        >>> @register_surgery(Scaled)
        ... def _(module, kept):
        ...     module.width = len(module.weight)

    Args:
        kinds: The types, subclasses included unless they have a rule of their own; or a class's name, so that its
            library need not be imported.

    The function gets the module, whose tensors are already sliced and whose attributes are the old ones, and the
    positions that stayed: tensor name (relative to the module) → dimension → positions.
    """

    def register(rule: Surgery) -> Surgery:
        _RULES.update(dict.fromkeys(kinds, rule))
        return rule

    return register


def adjust(model: nn.Module, kept: Selection) -> None:
    """Run the rule of every module that owns, or whose children own, a tensor in ``kept``."""
    for name, module in reversed(list(model.named_modules())):
        prefix = f"{name}." if name else ""
        own = {tensor.removeprefix(prefix): dims for tensor, dims in kept.items() if tensor.startswith(prefix)}
        rule = _rule_of(type(module)) if own else None
        if rule is not None:
            try:
                rule(module, own)
            except ValueError as error:
                raise ValueError(f"{name or type(model).__name__!r}: {error}") from error


def _rule_of(kind: type) -> Surgery | None:
    for ancestor in kind.__mro__:
        rule = _RULES.get(ancestor) or _RULES.get(ancestor.__name__)
        if rule is not None:
            return rule
    if kind.__module__.split(".")[0] == "transformers":
        if kind.__name__.endswith("Attention"):
            return _transformers_attention
        if kind.__name__.endswith("MLP"):
            return _transformers_mlp
    return None


def _blocks_left(dims: Dims, size: int, blocks: int, what: str) -> int:
    """How many of ``blocks`` equal blocks along dimension 0 are left; those that are must stay equally wide."""
    if blocks == 1 or 0 not in dims:
        return blocks
    counts = torch.bincount(dims[0].cpu() // (size // blocks), minlength=blocks)
    counts = counts[counts > 0]
    if int(counts.min()) != int(counts.max()):
        raise ValueError(
            f"its {what} would keep {counts.tolist()} channels, and they must stay equally wide; remove whole "
            f"{what}, or the same number of channels from each."
        )
    return len(counts)


@register_surgery(nn.Linear)
def _linear(module: nn.Linear, kept: Selection) -> None:
    module.out_features, module.in_features = module.weight.shape


@register_surgery(nn.Bilinear)
def _bilinear(module: nn.Bilinear, kept: Selection) -> None:
    module.out_features, module.in1_features, module.in2_features = module.weight.shape


@register_surgery(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def _convolution(module: nn.Conv2d, kept: Selection) -> None:
    module.groups = _blocks_left(kept.get("weight", {}), module.out_channels, module.groups, "groups")
    module.out_channels, module.in_channels = module.weight.shape[0], module.weight.shape[1] * module.groups


@register_surgery(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def _transposed_convolution(module: nn.ConvTranspose2d, kept: Selection) -> None:
    module.groups = _blocks_left(kept.get("weight", {}), module.in_channels, module.groups, "groups")
    module.in_channels, module.out_channels = module.weight.shape[0], module.weight.shape[1] * module.groups


@register_surgery(nn.modules.batchnorm._NormBase)
def _batch_norm(module: nn.BatchNorm2d, kept: Selection) -> None:
    module.num_features = len(next(t for t in (module.weight, module.running_mean) if t is not None))


@register_surgery(nn.LayerNorm, nn.RMSNorm)
def _layer_norm(module: nn.LayerNorm | nn.RMSNorm, kept: Selection) -> None:
    assert module.weight is not None
    module.normalized_shape = tuple(module.weight.shape)


@register_surgery(nn.GroupNorm)
def _group_norm(module: nn.GroupNorm, kept: Selection) -> None:
    module.num_groups = _blocks_left(kept.get("weight", {}), module.num_channels, module.num_groups, "groups")
    module.num_channels = len(module.weight)


@register_surgery(nn.Embedding, nn.EmbeddingBag)
def _embedding(module: nn.Embedding, kept: Selection) -> None:
    module.num_embeddings, module.embedding_dim = module.weight.shape


@register_surgery(nn.PReLU)
def _prelu(module: nn.PReLU, kept: Selection) -> None:
    module.num_parameters = len(module.weight)


@register_surgery(nn.MultiheadAttention)
def _multihead_attention(module: nn.MultiheadAttention, kept: Selection) -> None:
    SlimMultiheadAttention.adopt(module)


# The transformers library ------------------------------------------------------------------------------------------


@register_surgery("Conv1D")
def _conv1d(module: Any, kept: Selection) -> None:
    module.nx, module.nf = module.weight.shape


_WIDTH = ("attention_head_size", "head_dim", "key_value_proj_dim")
_QUERY, _KEY = ("query", "q_proj", "q_lin", "q", "q_attn"), ("key", "k_proj", "k_lin", "k")
_PACKED = ("c_attn", "query_key_value", "qkv_proj", "qkv")
_HEADS, _TOTAL = ("num_attention_heads", "num_heads", "n_heads", "n_head"), ("all_head_size", "inner_dim", "split_size")
_KEY_HEADS, _GROUPS = ("num_key_value_heads", "num_kv_heads"), "num_key_value_groups"


def heads_of(module: nn.Module) -> tuple[int, int, int] | None:
    """Heads, heads of keys and width of a head of an attention of the transformers library; they differ in names."""
    width = next((getattr(module, name) for name in _WIDTH if isinstance(getattr(module, name, None), int)), None)
    query, key = _outputs(module, _QUERY), _outputs(module, _KEY)
    if query is None:
        packed = _outputs(module, _PACKED)
        query = packed // 3 if packed is not None else None
    if width is None or query is None:
        return None
    return query // width, (key or query) // width, width


def _transformers_attention(module: nn.Module, kept: Selection) -> None:
    found = heads_of(module)
    if found is None:
        return
    heads, key_heads, width = found
    for name in _HEADS:
        _set(module, name, heads)
    for name in _TOTAL:
        _set(module, name, heads * width)
    for name in _KEY_HEADS:
        _set(module, name, key_heads)
    _set(module, _GROUPS, heads // key_heads)


def _transformers_mlp(module: nn.Module, kept: Selection) -> None:
    hidden = _outputs(module, ("up_proj", "gate_proj", "fc1", "c_fc", "dense_h_to_4h"))
    if hidden is not None:
        _set(module, "intermediate_size", hidden)


def _outputs(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """Width of the first child layer that has one of these names."""
    for name in names:
        child = getattr(module, name, None)
        weight = getattr(child, "weight", None)
        if isinstance(weight, Tensor):
            return weight.shape[1 if type(child).__name__ == "Conv1D" else 0]
    return None


def _set(module: nn.Module, name: str, value: int) -> None:
    """Only where there is such an attribute, and not where it is a property that follows by itself."""
    if name in vars(module):
        setattr(module, name, value)
