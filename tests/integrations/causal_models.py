"""Tiny causal models of every family from configurations, a tokenizer, and text."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

transformers = pytest.importorskip("transformers")

_SMALL: dict[str, Any] = {
    "vocab_size": 50, "hidden_size": 32, "num_attention_heads": 4, "num_key_value_heads": 2, "intermediate_size": 48,
    "num_hidden_layers": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
_GPT2: dict[str, Any] = {"vocab_size": 50, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64,
                         "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # fmt: skip
#: Name → class and configuration.
FAMILIES: dict[str, tuple[str, Any]] = {
    "llama": ("LlamaForCausalLM", transformers.LlamaConfig(**_SMALL)),
    "llama, tied": ("LlamaForCausalLM", transformers.LlamaConfig(**_SMALL, tie_word_embeddings=True)),
    "qwen2": ("Qwen2ForCausalLM", transformers.Qwen2Config(**_SMALL)),
    "mistral": ("MistralForCausalLM", transformers.MistralConfig(**_SMALL, sliding_window=8)),
    "gpt2": ("GPT2LMHeadModel", transformers.GPT2Config(**_GPT2)),
}
WORDS = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{number}" for number in range(46))]


def build(name: str, seed: int = 0) -> nn.Module:
    kind, config = FAMILIES[name]
    torch.manual_seed(seed)
    model: nn.Module = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():  # biases and norms, too, must not be trivial
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def windows(count: int = 9, length: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 50, (count, length), generator=torch.Generator().manual_seed(seed))


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    own = Tokenizer(models.WordLevel({word: place for place, word in enumerate(WORDS)}, unk_token="<unk>"))
    own.pre_tokenizer = pre_tokenizers.Whitespace()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=own, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def text(count: int = 400) -> str:
    """Words of the vocabulary, ten on a line."""
    ids = windows(1, count)[0].tolist()
    lines = [" ".join(WORDS[i] for i in ids[start : start + 10]) for start in range(0, count, 10)]
    return "\n".join(lines) + "\n"


def folder(place: Path, name: str = "llama", dtype: torch.dtype = torch.float32) -> Path:
    """A model folder with its tokenizer, as save_pretrained writes it."""
    model: Any = build(name)
    model.to(dtype).save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place
