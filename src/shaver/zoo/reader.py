"""A language model of the transformers library as a function of token numbers. It can be rebuilt from a plain dict."""

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from shaver.naming import require
from shaver.zoo.network import Network

#: Entries of a configuration that can name code to download, such as attention kernels.
_LOADS_CODE = re.compile("implementation|auto_map|quantization|^_")


class Reader(Network):
    """A model of the transformers library as a function from token numbers ``(batch, tokens)`` to logits.

    Args:
        network: A classifier or causal model whose configuration names a pad token.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__("reader")
        self.network = network
        config: Any = getattr(network, "config", None)
        if getattr(config, "pad_token_id", None) is None:
            raise ValueError(f"{type(network).__name__} has no pad token: set network.config.pad_token_id = … first.")
        self.pad = int(config.pad_token_id)
        self.positions: int | None = getattr(config, "max_position_embeddings", None)
        self.arguments |= {"model": type(network).__name__, "config": config.to_dict()}

    def forward(self, ids: Tensor) -> Tensor:
        """Logits: one row per review, or one per token."""
        if self.positions is not None and ids.shape[1] > self.positions:
            raise ValueError(f"{ids.shape[1]} tokens are too many: the network reads at most {self.positions}.")
        logits = self.network(input_ids=ids, attention_mask=(ids != self.pad).long()).logits
        assert isinstance(logits, Tensor)
        return logits


def rebuilt_reader(model: str, config: Mapping[str, Any]) -> Reader:
    """The architecture of a saved :class:`Reader`, from its plain arguments. Its weights are loaded afterwards.

    The arguments come from a file, so only sequence classifiers and causal models of the transformers library are
    built, by the table that its Auto classes use.

    Raises:
        ValueError: The name or the configuration belongs to another kind of model.
    """
    transformers = transformers_library()
    from transformers.models.auto import modeling_auto

    known = {
        *modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES.values(),
        *modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(),
    }
    kind = config.get("model_type") if isinstance(config, Mapping) else None
    if not isinstance(model, str) or model not in known or not isinstance(kind, str):
        raise ValueError(
            f"{model!r} is not a sequence classifier or causal model of the transformers library; a saved reader holds "
            "only these."
        )
    plain = {key: value for key, value in config.items() if key != "model_type" and not _LOADS_CODE.search(key)}
    with torch.random.fork_rng(devices=[]):
        return Reader(getattr(transformers, model)(transformers.AutoConfig.for_model(kind, **plain)))


def transformers_library() -> Any:
    """The transformers library, or an ``ImportError`` that says how to install it."""
    return require("transformers", "a language model", "transformers")
