"""The language experiments at a tiny size: a local folder of weights, reviews as tokens, OPD after the fact."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers as T

import shaver
from shaver.data.catalog import Texts
from shaver.study.language import TASKS, Reader, after_the_fact, build_reader, encode, train_reader, warm_up

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "the", "was"]
_QUICK = (*TASKS["minilm"].spam, ("every", 2), ("update", 4))
TASK = replace(TASKS["minilm"], length=8, epochs=6, batch_size=8, lr=1e-2, spam=_QUICK)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and tokenizer as a download would leave them."""
    place = tmp_path_factory.mktemp("weights")
    (place / "vocab.txt").write_text("\n".join(WORDS))
    tokenizer = T.BertTokenizerFast(vocab=str(place / "vocab.txt"))
    tokenizer.save_pretrained(place)
    torch.manual_seed(0)
    config = T.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
    )  # fmt: skip
    T.BertForSequenceClassification(config).save_pretrained(place)
    return place


def some_reviews(count: int = 48) -> Texts:
    labels = torch.arange(count) % 2
    return Texts([f"the<br />film was {'good' if label else 'bad'}" for label in labels.tolist()], labels)


def test_a_local_folder_is_fine_tuned_by_spam_and_pruned(folder: Path):
    model, tokenizer = build_reader(TASK, weights=folder)
    data = encode(some_reviews(), tokenizer, TASK)
    history = train_reader(model, data, TASK, "spam")
    found = shaver.measure.quality(model, data.batches(16))
    assert found.accuracy == 1.0
    assert history.posterior is not None
    shaver.prune(model, shaver.score(model, "opd", posterior=history.posterior), 0.5)
    assert shaver.measure.quality(model, data.batches(16)).accuracy == 1.0


def test_two_steps_after_training_give_a_posterior_and_leave_the_network_alone(folder: Path):
    model, tokenizer = build_reader(TASK, weights=folder)
    data = encode(some_reviews(), tokenizer, TASK)
    train_reader(model, data, TASK, "map")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    posterior = after_the_fact(model, data, TASK)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    precision = posterior.precision()
    assert precision.keys() == before.keys()
    h = posterior.curvature.diagonal()
    deltas = torch.cat([(precision[name] - h[name]).flatten() for name in precision])
    assert deltas.min() < 0.5  # δ was learned: it began at 1 everywhere
    assert deltas.max() > 2
    assert all(p.grad is None for p in model.parameters())


def test_reviews_become_token_numbers_and_next_words(folder: Path):
    _, tokenizer = build_reader(TASK, weights=folder)
    texts = Texts(["the film was good", "bad"], torch.tensor([1, 0]))
    ids = {word: number for number, word in enumerate(WORDS)}
    classified = encode(texts, tokenizer, TASK)
    rows = {int(y): x.tolist() for x, y in zip(classified.inputs, classified.targets, strict=True)}
    words = [ids[w] for w in ("[CLS]", "the", "film", "was", "good", "[SEP]")]
    assert rows[1] == [*words, 0, 0]
    causal = encode(texts, tokenizer, replace(TASK, causal=True))
    targets = {tuple(x.tolist()): y.tolist() for x, y in zip(causal.inputs, causal.targets, strict=True)}
    assert targets[(*words, 0, 0)] == [*words[1:], -100, -100, -100]
    assert len(encode(some_reviews(), tokenizer, TASK, count=5)) == 5


def test_the_mask_hides_the_padding(folder: Path):
    model, _ = build_reader(TASK, weights=folder)
    model.eval()
    short = torch.tensor([[2, 5, 7, 3]])
    padded = torch.nn.functional.pad(short, (0, 4), value=0)
    torch.testing.assert_close(model(padded), model(short), rtol=1e-5, atol=1e-6)


def test_the_learning_rate_rises_and_falls():
    assert warm_up(0.05) == pytest.approx(0.5)
    assert warm_up(0.1) == pytest.approx(1.0)
    assert warm_up(0.55) == pytest.approx(0.5)
    assert 0 < warm_up(0.0) < 0.01


def test_what_is_missing_is_named(folder: Path, tmp_path: Path):
    with pytest.raises(FileNotFoundError, match="'distilbert-base-uncased' is none"):
        build_reader(TASKS["distilbert"], weights="distilbert-base-uncased")
    with pytest.raises(ValueError, match="needs the folder of a vocabulary"):
        build_reader(TASKS["gpt2"])
    with pytest.raises(FileNotFoundError, match=r"needs encoder\.json and vocab\.bpe"):
        build_reader(TASKS["gpt2"], vocabulary=tmp_path)
    with pytest.raises(ValueError, match="20 tokens are more than the 16"):
        build_reader(replace(TASK, length=20), weights=folder)
    with pytest.raises(ValueError, match="Linear has no pad token"):
        Reader(nn.Linear(2, 2))
