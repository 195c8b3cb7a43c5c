"""Models of the transformers library after compaction: module attributes, configuration, and low-rank adapters."""

import math
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import partial
from itertools import product
from typing import Any

import torch
from torch import Tensor, nn

from shaver.criteria.prunable_weights import is_transposed_linear
from shaver.selection import Selection

_WIDTH = ("attention_head_size", "head_dim", "key_value_proj_dim")
_QUERY, _KEY = ("query", "q_proj", "q_lin", "q", "q_attn"), ("key", "k_proj", "k_lin", "k")
_PACKED = ("c_attn", "query_key_value", "qkv_proj", "qkv")
_HEADS, _TOTAL = ("num_attention_heads", "num_heads", "n_heads", "n_head"), ("all_head_size", "inner_dim", "split_size")
_KEY_HEADS, _GROUPS = ("num_key_value_heads", "num_kv_heads"), ("num_key_value_groups",)
_HIDDEN = ("intermediate_size", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner")


def rule_of(name: str) -> Callable[[Any, Selection], None] | None:
    """The rule for a module of the library, by the name of its class."""
    return _attention if name.endswith("Attention") else _mlp if name.endswith("MLP") else None


def heads_of(module: nn.Module) -> tuple[int, int, int] | None:
    """Heads, key-value heads and head width of an attention module; the library's models name these differently."""
    width = next((getattr(module, name) for name in _WIDTH if isinstance(getattr(module, name, None), int)), None)
    query, key = _outputs(module, _QUERY), _outputs(module, _KEY)
    if query is None and (packed := _outputs(module, _PACKED)) is not None:
        query = packed // 3
    if width is None or query is None:
        return None
    return query // width, (key or query) // width, width


def _attention(module: nn.Module, kept: Selection) -> None:
    found = heads_of(module)
    if found is None:
        return
    heads, key_heads, width = found
    _set(module, _HEADS, heads)
    _set(module, _TOTAL, heads * width)
    _set(module, _KEY_HEADS, key_heads)
    _set(module, _GROUPS, heads // key_heads)


def _mlp(module: nn.Module, kept: Selection) -> None:
    hidden = _outputs(module, ("up_proj", "gate_proj", "fc1", "c_fc", "dense_h_to_4h"))
    if hidden is not None:
        _set(module, ("intermediate_size",), hidden)


def _outputs(module: nn.Module, names: tuple[str, ...]) -> int | None:
    """Width of the first child layer that has one of these names."""
    for name in names:
        child = getattr(module, name, None)
        weight = getattr(child, "weight", None)
        if child is not None and isinstance(weight, Tensor):
            return weight.shape[1 if is_transposed_linear(child) else 0]
    return None


def _set(module: nn.Module, names: tuple[str, ...], value: int) -> None:
    """Set the attributes of these names that exist; a property follows by itself."""
    for name in names:
        if name in vars(module):
            setattr(module, name, value)


def is_pretrained(model: nn.Module) -> bool:
    """Whether this is a model of the transformers library, with a configuration and ``save_pretrained``."""
    return any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__)


def refit_config(model: nn.Module, shapes: Mapping[str, torch.Size], kept: Selection) -> None:
    """Give a compact transformers model a configuration that builds its shapes, so ``from_pretrained`` can load it.

    That exists where every layer kept the same number of hidden units and of heads, and, if heads were removed, where
    the class reads the width of a head from its configuration (Llama, Qwen, Mistral, ViT, T5). A new configuration is
    used only if a model built from it has exactly the same shapes. Otherwise the old one stays, and
    ``save_pretrained`` says that ``shaver.save`` stores the network. The caller's own configuration is not changed.
    """
    if not kept or not is_pretrained(model):
        return
    old: Any = model.config
    config = next((one for one in _configs(model, shapes, kept) if _like(model, one) is not None), None)
    owned = [vars(module).get("config") for module in model.modules()]  # kept alive, so that ids stay distinct
    new: dict[int, Any] = {} if config is None else {id(old): config}
    for module, own in zip(model.modules(), owned, strict=True):
        if config is not None and own is not None:
            if id(own) not in new:  # T5 keeps copies for its encoder and decoder
                new[id(own)] = _following(own, old, config)
            module.config = new[id(own)]
        if is_pretrained(module):
            vars(module).pop("save_pretrained", None)
            if config is None:
                setattr(module, "save_pretrained", partial(_refused, type(module).__name__))  # noqa: B010


def _following(own: Any, old: Any, new: Any) -> Any:
    """Another configuration inside a model, with the entries that changed from ``old`` to ``new``."""
    copy, before = deepcopy(own), old.to_dict()
    for key, value in new.to_dict().items():
        if before.get(key) != value and key in copy.to_dict():
            setattr(copy, key, value)
    return copy


def opens(model: nn.Module) -> bool:
    """Whether ``from_pretrained`` can open what ``save_pretrained`` writes."""
    return is_pretrained(model) and "save_pretrained" not in vars(model)


def skeleton(model: nn.Module) -> nn.Module | None:
    """A model of the same class and shapes without weights; None where its configuration does not build it."""
    return _like(model, deepcopy(model.config))


def without_weights(kind: type[nn.Module], config: Any) -> nn.Module | None:
    """A model of a class from a configuration, without weights; None where the configuration does not build one."""
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            return kind(config)
    except Exception:  # a configuration's own checks raise what they like
        return None


def _refused(name: str, *args: Any, **kwargs: Any) -> None:
    raise ValueError(
        f"no configuration of {name} expresses the widths of this compact model, so from_pretrained could not open "
        "the folder. shaver.save(model, folder) stores the model and shaver.load opens it. shaver.compact without "
        "free_widths=True chooses widths that a configuration expresses."
    )


def _configs(model: nn.Module, shapes: Mapping[str, torch.Size], kept: Selection) -> Iterator[Any]:
    """Configurations that may build the model: with its heads or the old ones, and possible hidden widths."""
    old: Any = model.config
    base = deepcopy(old)
    heads = {heads_of(module) for module in model.modules()} - {None}
    if len(heads) == 1:
        base.num_attention_heads, keys, width = heads.pop()  # type: ignore[misc]
        if width * old.num_attention_heads != old.hidden_size or base.num_attention_heads != old.num_attention_heads:
            base.head_dim = width
        if isinstance(getattr(base, "num_key_value_heads", None), int):
            base.num_key_value_heads = keys
    cuts = {(shapes[tensor][dim], len(stay)) for tensor, dims in kept.items() for dim, stay in dims.items()}
    widths = {}
    for name in _HIDDEN:
        width = getattr(old, name, None)
        if name == "n_inner" and hasattr(old, name):
            width = width or 4 * old.hidden_size  # GPT-2's None
        if isinstance(width, int):
            widths[name] = [*sorted(left for before, left in cuts if before == width), width][:4]
    for start, *sizes in product((base, old), *widths.values()):
        config = deepcopy(start)
        for name, size in zip(widths, sizes, strict=True):
            setattr(config, name, size)
        yield config


def _like(model: nn.Module, config: Any) -> nn.Module | None:
    """A model of the same class, without weights, from a configuration; None if its shapes differ."""
    built = without_weights(type(model), config)
    return built if built is not None and _shapes(built) == _shapes(model) else None


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in model.state_dict().items()}


def refit_adapters(model: nn.Module) -> None:
    """Give every low-rank adapter (LoRA) of the peft library, and its configuration, the ranks of its matrices.

    Nothing is imported from peft: its layers are known by their attributes. The scale of an update
    (``lora_alpha / r``) stays what it was. peft's ``rank_pattern`` and ``alpha_pattern`` name the layers whose rank
    differs from the configured one, so ``PeftModel.from_pretrained`` opens what ``save_pretrained`` writes.
    """
    for holder in model.modules():
        configs: Any = vars(holder).get("peft_config")
        if not isinstance(configs, dict):
            continue
        inner: Any = getattr(holder, "model", holder)
        for path, layer in inner.named_modules():
            matrices: Any = getattr(layer, "lora_A", None)
            if not isinstance(matrices, nn.ModuleDict):
                continue
            for name, matrix in matrices.items():
                weight: Any = matrix.weight
                rank, config = len(weight), configs.get(name)
                if config is None or layer.r[name] == rank:
                    continue
                layer.r[name] = rank
                scale = layer.scaling[name] * (math.sqrt(rank) if config.use_rslora else rank)
                layer.lora_alpha[name] = scale
                config.rank_pattern = {**config.rank_pattern, path: rank}
                config.alpha_pattern = {**config.alpha_pattern, path: scale}
