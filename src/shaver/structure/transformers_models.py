"""Models of the transformers library after compaction: the attributes of their modules, and their configuration."""

from collections.abc import Callable, Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from shaver.selection import Selection

_WIDTH = ("attention_head_size", "head_dim", "key_value_proj_dim")
_QUERY, _KEY = ("query", "q_proj", "q_lin", "q", "q_attn"), ("key", "k_proj", "k_lin", "k")
_PACKED = ("c_attn", "query_key_value", "qkv_proj", "qkv")
_HEADS, _TOTAL = ("num_attention_heads", "num_heads", "n_heads", "n_head"), ("all_head_size", "inner_dim", "split_size")
_KEY_HEADS, _GROUPS = ("num_key_value_heads", "num_kv_heads"), "num_key_value_groups"
_HIDDEN = ("intermediate_size", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner")


def rule_of(name: str) -> Callable[[Any, Selection], None] | None:
    """The rule for a module of the library, by the name of its class."""
    if name.endswith("Attention"):
        return _attention
    return _mlp if name.endswith("MLP") else None


def heads_of(module: nn.Module) -> tuple[int, int, int] | None:
    """Heads, key-value heads and head width of an attention module; the library's models name these differently."""
    width = next((getattr(module, name) for name in _WIDTH if isinstance(getattr(module, name, None), int)), None)
    query, key = _outputs(module, _QUERY), _outputs(module, _KEY)
    if query is None:
        packed = _outputs(module, _PACKED)
        query = packed // 3 if packed is not None else None
    if width is None or query is None:
        return None
    return query // width, (key or query) // width, width


def _attention(module: nn.Module, kept: Selection) -> None:
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


def _mlp(module: nn.Module, kept: Selection) -> None:
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
    """Set an attribute that exists; a property follows by itself."""
    if name in vars(module):
        setattr(module, name, value)


def refit_config(model: nn.Module, shapes: Mapping[str, torch.Size], kept: Selection) -> bool:
    """Give a compact transformers model a configuration that builds its shapes, so ``from_pretrained`` can load it.

    That exists where every layer kept the same number of hidden units and of heads, and, if heads went, where the
    model's class reads the width of a head from its configuration (Llama and its kin, ViT). The new configuration is
    believed only after a model built from it has the very same shapes. Otherwise the old one stays, and
    ``shaver.save`` is the way to store the network. The object that the caller built the model with is not changed.

    Args:
        model: Sliced already; a model of another library is left alone.
        shapes: Tensor → shape before.
        kept: Tensor → dimension → the positions that stayed.

    Returns:
        Whether the configuration was changed.
    """
    if not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    old: Any = model.config
    config = deepcopy(old)
    for name in _HIDDEN:
        width = getattr(config, name, None)
        if name == "n_inner" and hasattr(config, name):
            width = width or 4 * config.hidden_size  # GPT-2's None
        cuts = [(shapes[tensor][dim], len(stay)) for tensor, dims in kept.items() for dim, stay in dims.items()]
        left = {size for before, size in cuts if before == width}
        if len(left) == 1:
            setattr(config, name, left.pop())
    heads = {heads_of(module) for module in model.modules()} - {None}
    if len(heads) == 1:
        config.num_attention_heads, keys, width = heads.pop()  # type: ignore[misc]
        if width * old.num_attention_heads != old.hidden_size or config.num_attention_heads != old.num_attention_heads:
            config.head_dim = width
        if isinstance(getattr(config, "num_key_value_heads", None), int):
            config.num_key_value_heads = keys
    if config.to_dict() == old.to_dict() or not _builds(type(model), config, model):
        return False
    for module in model.modules():
        if vars(module).get("config") is old:
            module.config = config
    return True


def _builds(kind: Any, config: Any, model: nn.Module) -> bool:
    """Whether the class makes the model's shapes from a configuration."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            built = kind(config)
    except Exception:  # a configuration's own checks raise what they like
        return False
    return {n: t.shape for n, t in built.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}
