"""Small language models of the four common families, in float64, with token batches that have padding."""

import os
from collections.abc import Callable
from typing import Any

import torch

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers as T
from torch import Tensor, nn

VOCABULARY, CLASSES, LENGTH = 13, 3, 5

_BERT = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
_BERT |= {"intermediate_size": 12, "max_position_embeddings": 6, "num_labels": CLASSES, "pad_token_id": 0}
_DISTIL = {"vocab_size": VOCABULARY, "dim": 8, "n_layers": 1, "n_heads": 2, "hidden_dim": 12}
_DISTIL |= {"max_position_embeddings": 6, "num_labels": CLASSES, "pad_token_id": 0}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 8, "n_layer": 1, "n_head": 2, "n_positions": 6, "n_inner": 12}
_GPT2 |= {"num_labels": CLASSES, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}
_LLAMA = {"vocab_size": VOCABULARY, "hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 4}
_LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 12, "max_position_embeddings": 6}
_LLAMA |= {"num_labels": CLASSES, "pad_token_id": 0}

CLASSIFIERS: dict[str, Callable[[], nn.Module]] = {
    "bert": lambda: T.BertForSequenceClassification(T.BertConfig(**_BERT)),
    "distilbert": lambda: T.DistilBertForSequenceClassification(T.DistilBertConfig(**_DISTIL)),
    "gpt2": lambda: T.GPT2ForSequenceClassification(T.GPT2Config(**_GPT2)),
    "llama": lambda: T.LlamaForSequenceClassification(T.LlamaConfig(**_LLAMA)),
}
CAUSAL: dict[str, Callable[[], nn.Module]] = {
    "gpt2": lambda: T.GPT2LMHeadModel(T.GPT2Config(**_GPT2)),
    "llama": lambda: T.LlamaForCausalLM(T.LlamaConfig(**_LLAMA)),
    "llama tied": lambda: T.LlamaForCausalLM(T.LlamaConfig(**_LLAMA, tie_word_embeddings=True)),
}


def mixtral() -> nn.Module:
    """A mixture of experts: each token is processed by two of three."""
    return T.MixtralForSequenceClassification(
        T.MixtralConfig(**_LLAMA, num_local_experts=3, num_experts_per_tok=2, sliding_window=None)
    )


def build(make: Callable[[], nn.Module], seed: int = 0) -> nn.Module:
    """Random weights large enough to matter, no dropout, training mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = make().double()
        for p in model.parameters():
            p.data.add_(0.2 * torch.randn_like(p))
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        for name in ("dropout_prob", "attention_dropout"):
            if isinstance(getattr(module, name, None), float):
                setattr(module, name, 0.0)
    return model.train()


def tokens(samples: int, causal: bool, seed: int = 1) -> dict[str, Tensor]:
    """A dict batch; the second sample is shorter than the others."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(1, VOCABULARY, (samples, LENGTH), generator=generator)
    mask = torch.ones_like(ids)
    if samples > 1:
        mask[1, 3:] = 0
    ids = ids * mask
    labels = torch.randint(CLASSES, (samples,), generator=generator)
    return {
        "input_ids": ids,
        "attention_mask": mask,
        "labels": ids.masked_fill(mask == 0, -100) if causal else labels,
    }


def one_by_one(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value[n : n + 1] for key, value in batch.items()} for n in range(len(batch["labels"]))]
