"""Low-rank adapters (LoRA) of the peft library after compaction: their ranks, and the configuration that opens them.

Nothing is imported from peft: its layers are known by their attributes.
"""

import math
from typing import Any

from torch import nn


def refit_adapters(model: nn.Module) -> None:
    """Give every LoRA layer and its configuration the ranks that its matrices have.

    The scale of an update (``lora_alpha / r``) stays what it was. peft's ``rank_pattern`` and ``alpha_pattern`` name
    the layers whose rank differs from the configured one, so ``PeftModel.from_pretrained`` opens what
    ``save_pretrained`` writes.
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
