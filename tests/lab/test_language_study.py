"""Language models in studies: a local folder of weights, reviews as tokens, and recipes from the command line."""

import contextlib
import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import transformers as T

import shaver
from shaver.commands.main import main
from shaver.data.catalog import Texts, TextSplits
from shaver.files import load_trained
from shaver.lab import get_recipe, load_runs, run_study
from shaver.lab.recipes.grid import cells_of
from shaver.lab.recipes.language import (
    Reader,
    after_the_fact,
    build_network,
    build_reader,
    encode,
    tokenizer_of,
    warm_up,
)
from shaver.lab.recipes.recipe import SCALES
from shaver.lab.run.cell import run_cell
from shaver.lab.run.results import DENSE

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "good", "bad", "film", "the", "was"]
NAMES = ("distilbert-imdb", "gpt2-imdb", "minilm-imdb", "small-gpt-imdb", "small-gpt-words")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights and tokenizer as a download would leave them."""
    place = tmp_path_factory.mktemp("weights")
    (place / "vocab.txt").write_text("\n".join(WORDS))
    T.BertTokenizerFast(vocab=str(place / "vocab.txt")).save_pretrained(place)
    torch.manual_seed(0)
    config = T.BertConfig(
        vocab_size=len(WORDS), hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=24,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
        initializer_range=0.3,
    )  # fmt: skip
    T.BertForSequenceClassification(config).save_pretrained(place)
    return place


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Byte pairs of single letters, and no merge."""
    place = tmp_path_factory.mktemp("vocabularies")
    (place / "gpt2-bpe").mkdir()
    letters = [*"abcdefghijklmnopqrstuvwxyz", "Ġ", "<|endoftext|>"]
    (place / "gpt2-bpe" / "encoder.json").write_text(json.dumps({x: i for i, x in enumerate(letters)}))
    (place / "gpt2-bpe" / "vocab.bpe").write_text("#version: 0.2\n")
    return place


def some_reviews(count: int = 48) -> Texts:
    labels = torch.arange(count) % 2
    return Texts([f"the<br />film was {'good' if label else 'bad'}" for label in labels.tolist()], labels)


@pytest.fixture
def imdb(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few short reviews under the name of the large data set."""
    splits = TextSplits("imdb", some_reviews(64), None, some_reviews(20), 2)
    monkeypatch.setattr("shaver.data.load", lambda name, **_: {"imdb": splits}[name])


class Here:
    """Runs each cell in this process."""

    slots = 1

    def __init__(self, *_: object) -> None:
        pass

    def start(self, folder: Path, store: Path, any_code: bool) -> "Here":
        with contextlib.suppress(Exception):  # it is in the cell's files
            run_cell(str(folder), str(store), any_code)
        return self

    def poll(self) -> str:
        return ""


SMALL = {"length": 8, "batch_size": 8, "samples": 48, "scored": 16, "lr": 1e-2}


def quick(folder: Path, **changed):
    """The MiniLM recipe on tiny weights."""
    recipe = get_recipe("minilm-imdb").override(weights=folder, epochs=8, **SMALL, **changed)
    tasks = tuple(replace(t, spam={**t.spam, "every": 2, "update": 4}) for t in recipe.tasks)
    return replace(recipe, tasks=tasks)


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory):
    with pytest.MonkeyPatch.context() as patch:
        splits = TextSplits("imdb", some_reviews(64), None, some_reviews(20), 2)
        patch.setattr("shaver.data.load", lambda name, **_: {"imdb": splits}[name])
        out = tmp_path_factory.mktemp("runs") / "minilm-imdb-cpu"
        outcome = run_study(quick(folder, sparsities=(0.25, 0.5)), out, engine=Here())
    return out, outcome


def test_a_recipe_runs_from_a_local_folder_to_the_table_of_every_other_recipe(finished):
    out, outcome = finished
    assert outcome.failed == {}
    frame = load_runs(out)
    dense = frame[frame.criterion == DENSE]
    assert (dense.accuracy == 1.0).all(), "both trainings learn to tell good from bad"
    assert len(dense) == 5, "a cell each: MAP post hoc, after two steps and structured; SpaM post hoc and structured"
    counts = frame[frame.criterion != DENSE].groupby(["method", "stage"]).size().to_dict()
    assert counts == {
        ("map", "posthoc"): 10, ("map", "two-steps"): 2, ("map", "structured"): 6,
        ("spam", "posthoc"): 10, ("spam", "structured"): 6,
    }  # fmt: skip
    assert set(frame.network) == {"minilm"}
    assert set(frame.data) == {"imdb"}
    whole = frame[(frame.stage == "structured") & (frame.criterion == "opd") & (frame.sparsity == 0.5)]
    assert (whole.parameters < dense.parameters.max()).all()
    assert (whole.flops < dense.flops.max()).all()


def test_the_stages_share_their_networks(finished):
    out, _ = finished
    assert len(list((out.parent / "networks").glob("*/training.json"))) == 2


def test_the_report_takes_it(finished, tmp_path, capsys):
    out, _ = finished
    assert main(["report", str(out), "--out", str(tmp_path / "report"), "--formats", "markdown"]) == 0
    text = "".join(path.read_text() for path in (tmp_path / "report").rglob("*.md"))
    assert "MiniLM" in text
    assert "two SpaM steps after training" in text


def test_a_saved_network_needs_no_folder_of_weights(finished):
    out, _ = finished
    for cell in (out / "cells").iterdir():
        trained = load_trained(cell / "model.safetensors")
        assert trained.posterior is not None, "the weights are those the posterior belongs to"
        assert trained.model(torch.tensor([[2, 8, 7, 9, 5, 3]])).argmax() == 1


def test_networks_of_the_zoo_are_built_as_before():
    assert torch.equal(build_network("lenet", seed=1).conv1.weight, shaver.zoo.build("lenet", seed=1).conv1.weight)


def test_a_gpt_from_scratch_and_its_next_words(imdb, vocabularies, tmp_path, monkeypatch):
    monkeypatch.setattr("shaver.commands.run.LocalEngine", Here)
    monkeypatch.chdir(tmp_path)
    few = ["--epochs", "1", "--samples", "16", "--test-samples", "8", "--length", "16", "--scored", "8"]
    few += ["--batch-size", "8", "--criteria", "opd", "snip", "--sparsities", "0.5"]
    for name, stages in (("small-gpt-imdb", ["posthoc", "two-steps"]), ("small-gpt-words", ["posthoc"])):
        arguments = ["run", name, "--vocabularies", str(vocabularies), *few, "--stages", *stages]
        assert main(arguments) == 0
        frame = load_runs(tmp_path / "runs" / f"{name}-cpu")
        assert set(frame.criterion) == {DENSE, "opd", "snip"}
        assert set(frame.stage) == set(stages)
        assert frame.nll.notna().all()
    study = json.loads((tmp_path / "runs" / "small-gpt-words-cpu" / "study.json").read_text())
    words = "tokens per text 16 instead of 64, test samples 8 instead of 500"
    assert words in study["note"], "what is smaller than in the paper is said"


def test_two_steps_after_training_give_a_posterior_and_leave_the_network_alone(folder: Path):
    model = build_reader("minilm", weights=str(folder))
    data = encode(some_reviews(), tokenizer_of("minilm", weights=str(folder)), 8)
    shaver.fit(model, data, method="map", epochs=6, batch_size=8, lr=1e-2, optimizer="adamw")
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    posterior = after_the_fact(model, data, batch_size=8)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())
    precision = posterior.precision()
    assert precision.keys() == before.keys()
    h = posterior.curvature.diagonal()
    deltas = torch.cat([(precision[name] - h[name]).flatten() for name in precision])
    assert deltas.min() < 0.5  # δ was learned: it began at 1 everywhere
    assert deltas.max() > 2
    assert all(p.grad is None for p in model.parameters())


def test_reviews_become_token_numbers_and_next_words(folder: Path):
    tokenizer = tokenizer_of("minilm", weights=str(folder))
    texts = Texts(["the film was good", "bad"], torch.tensor([1, 0]))
    ids = {word: number for number, word in enumerate(WORDS)}
    classified = encode(texts, tokenizer, 8)
    rows = {int(y): x.tolist() for x, y in zip(classified.inputs, classified.targets, strict=True)}
    words = [ids[w] for w in ("[CLS]", "the", "film", "was", "good", "[SEP]")]
    assert rows[1] == [*words, 0, 0]
    causal = encode(texts, tokenizer, 8, causal=True)
    targets = {tuple(x.tolist()): y.tolist() for x, y in zip(causal.inputs, causal.targets, strict=True)}
    assert targets[(*words, 0, 0)] == [*words[1:], -100, -100, -100]
    assert len(encode(some_reviews(), tokenizer, 8, count=5)) == 5


def test_the_mask_hides_the_padding(folder: Path):
    model = build_reader("minilm", weights=str(folder)).eval()
    short = torch.tensor([[2, 5, 7, 3]])
    padded = torch.nn.functional.pad(short, (0, 4), value=0)
    torch.testing.assert_close(model(padded), model(short), rtol=1e-5, atol=1e-6)


def test_the_learning_rate_rises_and_falls():
    assert warm_up(0.05) == pytest.approx(0.5)
    assert warm_up(0.1) == pytest.approx(1.0)
    assert warm_up(0.55) == pytest.approx(0.5)
    assert 0 < warm_up(0.0) < 0.01


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("name", NAMES)
def test_every_recipe_takes_local_folders(name, scale):
    recipe = get_recipe(name, scale).override(weights="somewhere")
    for cell in cells_of(recipe):
        assert cell.training.network["weights"] == "somewhere"
        assert cell.training.data["length"] == recipe.tasks[0].length
    assert bool(recipe.note) == (scale == "cpu")


def test_the_papers_two_have_its_settings_and_say_when_weights_are_random():
    (distilbert,) = get_recipe("distilbert-imdb", "paper").tasks
    assert (distilbert.epochs, distilbert.batch_size, distilbert.lr, distilbert.length) == (5, 32, 2e-5, 512)
    gpt2 = get_recipe("gpt2-imdb", "paper")
    assert {(c.training.labels["method"], c.stage.name) for c in cells_of(gpt2)} == {
        ("map", "posthoc"), ("map", "two-steps"),
    }  # fmt: skip
    assert gpt2.override(weights="folder").note == ""
    assert gpt2.override(vocabularies="folder").note == "random instead of pretrained weights"
    assert "random" not in get_recipe("small-gpt-imdb").override(vocabularies="folder").note


def test_other_networks_keep_their_names():
    """Settings of texts leave the cells of images where they are: their networks are found again."""
    (cell, *_) = cells_of(get_recipe("fcn-cancer"))
    assert set(cell.training.data) == {"name", "augment", "samples", "seed"}
    assert set(cell.training.fit) <= {"method", "epochs", "batch_size", "optimizer", "lr", "seed", "spam"}


def test_the_list_and_the_recipe_are_shown_without_any_folder(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["list", "--runs", str(tmp_path)]) == 0
    text = capsys.readouterr().out
    assert "Language: DistilBERT on IMDB" in text
    assert "Language: GPT (4 × 128) on IMDB, from scratch" in text
    assert main(["run", "gpt2-imdb", "--scale", "paper", "--show"]) == 0
    assert "two-steps: opd at 20 40" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["small-gpt-imdb"], "'small-gpt' without pretrained weights needs a vocabulary: --vocabularies FOLDER, with "
                             "gpt2-bpe/encoder.json and gpt2-bpe/vocab.bpe in it; or --weights FOLDER"),
        (["distilbert-imdb", "--scale", "paper"], "with bert-base-uncased-vocab/vocab.txt in it"),
        (["distilbert-imdb", "--weights", "distilbert-base-uncased"], "'distilbert-base-uncased' is not such a folder"),
        (["gpt2-imdb", "--vocabularies", "nowhere"], "there is no nowhere/gpt2-bpe/encoder.json"),
        (["lenet-mnist", "--weights", "x"], "recipe 'lenet-mnist' uses no texts, so weights has no effect"),
        (["minilm-imdb", "--methods", "map", "l1"], "trains language models: by map or spam, not by l1"),
        (["minilm-imdb", "--length", "0"], "length must be an integer of at least 1, not 0"),
    ],
)  # fmt: skip
def test_what_is_missing_is_named_before_anything_runs(arguments, message, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["run", *arguments]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not list(tmp_path.iterdir())


def test_a_network_that_cannot_read_them_is_told(folder: Path):
    with pytest.raises(ValueError, match="20 tokens are too many: the network reads at most 16"):
        build_reader("minilm", weights=str(folder))(torch.zeros(1, 20, dtype=torch.long))
    with pytest.raises(ValueError, match="Linear has no pad token"):
        Reader(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="unknown language model 'minilmm'; did you mean 'minilm'"):
        build_reader("minilmm")
