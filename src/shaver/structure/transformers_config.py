"""The configuration of a transformers model after compaction: it keeps describing the model where it can."""

from collections.abc import Mapping
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from shaver.structure.groups import Groups

_HIDDEN = ("intermediate_size", "hidden_dim", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff", "n_inner")


def refit_config(model: nn.Module, groups: Groups, kept: Mapping[str, Tensor]) -> bool:
    """Give a compact transformers model a configuration that builds its shapes, so ``from_pretrained`` can load it.

    That exists where every layer kept the same number of hidden units and of heads, and the configuration has a head
    width of its own (Llama and its kin) or no head was removed. The new configuration is believed only after a model
    built from it has the very same shapes. Otherwise the old one stays, and ``shaver.save`` is the way to store the
    network. The object that the caller built the model with is not changed.

    Returns:
        Whether the configuration was changed.
    """
    if not kept or not any(kind.__name__ == "PreTrainedModel" for kind in type(model).__mro__):
        return False
    old: Any = model.config
    config = deepcopy(old)
    widths = {kind: _uniform(groups, kept, kind) for kind in ("hidden", "heads")}
    if widths["hidden"] is not None:
        for name in _HIDDEN:
            if hasattr(config, name):
                setattr(config, name, widths["hidden"])
    if widths["heads"] is not None:
        _set_heads(config, widths["heads"])
    if not _builds(type(model), config, model):
        return False
    for module in model.modules():
        if vars(module).get("config") is old:
            module.config = config
    return True


def _uniform(groups: Groups, kept: Mapping[str, Tensor], kind: str) -> int | None:
    """How many units each group of a kind has now, if they agree."""
    left = {int(kept[n].sum()) if n in kept else g.units for n, g in groups.items() if g.kind == kind}
    return left.pop() if len(left) == 1 else None


def _set_heads(config: Any, units: int) -> None:
    heads, keys = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    if hasattr(config, "head_dim"):
        config.head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    if isinstance(keys, int):
        config.num_key_value_heads = units  # with grouped queries a unit is a key head and all that ask it
        config.num_attention_heads = units * (heads // keys)
    else:
        config.num_attention_heads = units


def _builds(kind: Any, config: Any, model: nn.Module) -> bool:
    try:
        with torch.random.fork_rng(devices=[]), torch.device("meta"):
            built = kind(config)
    except Exception:  # a configuration's own checks raise what they like
        return False
    return {n: t.shape for n, t in built.state_dict().items()} == {n: t.shape for n, t in model.state_dict().items()}
