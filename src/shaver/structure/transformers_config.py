"""The configuration of a transformers model after compaction: it keeps describing the model where it can."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import nn

from shaver.selection import Selection
from shaver.structure.surgery import heads_of

_HIDDEN = ("intermediate_size", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner")


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
