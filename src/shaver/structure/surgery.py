"""The attributes of modules after their tensors were sliced: widths, channel and head counts, groups.

A rule is one function, found by the module's type. It runs after the slicing, children before their parents.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from shaver.selection import Selection
from shaver.structure import transformers_models
from shaver.structure.attention import SlimMultiheadAttention

#: ``rule(module, kept)``: ``kept`` has the module's own tensor names and those of its children, relative to it.
Surgery = Callable[[Any, Selection], None]

_RULES: dict[type[nn.Module] | str, Surgery] = {}


def register_surgery(*kinds: type[nn.Module] | str) -> Callable[[Surgery], Surgery]:
    """Register how to adjust a module type that keeps a width in an attribute.

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
        return transformers_models.rule_of(kind.__name__)
    return None


def _groups_left(kept: Selection, channels: int, groups: int) -> int:
    """The number of groups left along dimension 0 of the weight; those that are left must stay equally wide."""
    dims = kept.get("weight", {})
    if groups == 1 or 0 not in dims:
        return groups
    counts = torch.bincount(dims[0].cpu() // (channels // groups), minlength=groups)
    counts = counts[counts > 0]
    if int(counts.min()) != int(counts.max()):
        raise ValueError(
            f"its groups would keep {counts.tolist()} channels, and they must stay equally wide; remove whole "
            "groups, or the same number of channels from each."
        )
    return len(counts)


def _named_sizes(names: tuple[str, ...], module: Any, kept: Selection) -> None:
    """Attributes that are the sizes of the weight, in order."""
    for name, size in zip(names, module.weight.shape, strict=True):
        setattr(module, name, size)


_SIZES: dict[type[nn.Module] | str, tuple[str, ...]] = {
    nn.Linear: ("out_features", "in_features"),
    nn.Bilinear: ("out_features", "in1_features", "in2_features"),
    nn.Embedding: ("num_embeddings", "embedding_dim"),
    nn.EmbeddingBag: ("num_embeddings", "embedding_dim"),
    nn.PReLU: ("num_parameters",),
    "Conv1D": ("nx", "nf"),  # the linear layer of GPT-2
}
for _kind, _names in _SIZES.items():
    register_surgery(_kind)(partial(_named_sizes, _names))


@register_surgery(nn.modules.conv._ConvNd)
def _convolution(module: Any, kept: Selection) -> None:
    first, second = "out_channels", "in_channels"
    if isinstance(module, nn.modules.conv._ConvTransposeNd):
        first, second = second, first
    module.groups = _groups_left(kept, getattr(module, first), module.groups)
    setattr(module, first, module.weight.shape[0])
    setattr(module, second, module.weight.shape[1] * module.groups)


@register_surgery(nn.modules.batchnorm._NormBase)
def _batch_norm(module: nn.BatchNorm2d, kept: Selection) -> None:
    module.num_features = len(next(t for t in (module.weight, module.running_mean) if t is not None))


@register_surgery(nn.LayerNorm, nn.RMSNorm)
def _layer_norm(module: nn.LayerNorm | nn.RMSNorm, kept: Selection) -> None:
    assert module.weight is not None
    module.normalized_shape = tuple(module.weight.shape)


@register_surgery(nn.GroupNorm)
def _group_norm(module: nn.GroupNorm, kept: Selection) -> None:
    module.num_groups = _groups_left(kept, module.num_channels, module.num_groups)
    module.num_channels = len(module.weight)


@register_surgery(nn.MultiheadAttention)
def _multihead_attention(module: nn.MultiheadAttention, kept: Selection) -> None:
    SlimMultiheadAttention.adopt(module)
