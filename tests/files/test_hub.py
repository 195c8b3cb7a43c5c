"""Compact networks in a hub's folder format: written, read back, and described, with no hub in sight."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from torch import Tensor, nn

import shaver
from shaver.files import hub
from shaver.files.card import Card, markdown_table
from shaver.files.hub import pull, push, write_folder
from tests.curvature.languages import CAUSAL, CLASSIFIERS, build, tokens


def logits(model: nn.Module, causal: bool) -> Tensor:
    batch = {key: value for key, value in tokens(4, causal).items() if key != "labels"}
    with torch.no_grad():
        found = model.eval()(**batch).logits
    assert isinstance(found, Tensor)
    return found


@pytest.fixture(scope="module")
def small() -> nn.Module:
    batch = {key: value for key, value in tokens(2, True).items() if key != "labels"}
    return shaver.compact(build(CAUSAL["llama"]).float(), example=batch, criterion="magnitude", sparsity=0.5)


def test_a_compact_language_model_comes_back_from_its_folder(tmp_path: Path, small: nn.Module):
    write_folder(small, tmp_path)
    again = shaver.load(tmp_path, factory=lambda: build(CAUSAL["llama"], seed=5).float())
    assert sum(p.numel() for p in again.parameters()) == sum(p.numel() for p in small.parameters())
    torch.testing.assert_close(logits(again, True), logits(small, True))
    assert pull(str(tmp_path), factory=lambda: again) is again  # a network as small already is filled as it is


def test_the_library_itself_reads_a_model_whose_configuration_says_its_widths(tmp_path: Path, small: nn.Module):
    write_folder(small, tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["architectures"] == ["LlamaForCausalLM"]
    again = T.AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(logits(again, True), logits(small, True))


def test_tied_weights_are_stored_once_and_stay_tied(tmp_path: Path):
    model = build(CAUSAL["gpt2"]).float()
    write_folder(model, tmp_path)
    stored = shaver.io.load_tensors(tmp_path / "model.safetensors")
    assert "transformer.wte.weight" in stored
    assert "lm_head.weight" not in stored
    again = shaver.load(tmp_path, factory=lambda: build(CAUSAL["gpt2"], seed=3).float())
    torch.testing.assert_close(logits(again, True), logits(model, True))
    assert again.lm_head.weight is again.transformer.wte.weight  # type: ignore[union-attr]


def test_a_network_of_the_zoo_needs_no_factory(tmp_path: Path):
    model = shaver.zoo.build("lenet", seed=0)
    x = torch.randn(2, 1, 28, 28)
    small = shaver.compact(model, example=x, criterion="magnitude", sparsity=0.5)
    write_folder(small, tmp_path)
    torch.testing.assert_close(shaver.load(tmp_path).eval()(x), small.eval()(x))


def test_the_card_tells_of_the_run_with_its_table_and_figures(tmp_path: Path):
    figure = tmp_path / "curve.svg"
    figure.write_text("<svg/>")
    rows = [{"criterion": "opd", "sparsity": 0.95, "accuracy": 0.91234567}, {"criterion": "a|b", "ece": 0.01}]
    card = Card(
        "Small network",
        "Trained with SpaM.",
        rows,
        [figure],
        {"epochs": 3, "prior": "unit"},
        license="apache-2.0",
        datasets=["imdb"],
    )
    write_folder(build(CLASSIFIERS["bert"]), tmp_path / "out", card=card)
    text = (tmp_path / "out" / "README.md").read_text()
    assert text.startswith('---\nlibrary_name: "shaver"\nlicense: "apache-2.0"\n')
    assert '\ndatasets: ["imdb"]\ntags: ["shaver", "pruning"]\n---\n' in text
    assert "| criterion | sparsity | accuracy | ece |" in text
    assert "| opd | 0.95 | 0.9123 |  |" in text
    assert "| a\\|b |  |  | 0.01 |" in text
    assert "| prior | unit |" in text
    assert "![curve](figures/curve.svg)" in text
    assert (tmp_path / "out" / "figures" / "curve.svg").read_text() == "<svg/>"
    assert "shaver.load" in text


def test_a_history_makes_rows_for_a_card(tmp_path: Path):
    data = shaver.data.InMemory(torch.randn(32, 4), torch.randint(2, (32,)), classes=2)
    history = shaver.fit(nn.Sequential(nn.Linear(4, 2)), data, method="map", epochs=2, batch_size=16)
    text = markdown_table(history)
    assert text.splitlines()[0].startswith("| epoch | ")
    assert len(text.splitlines()) == 4


def test_a_figure_that_is_missing_is_named_before_anything_is_written(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"figure 'nowhere\.svg'"):
        Card("x", figures=["nowhere.svg"]).write(tmp_path)
    assert not list(tmp_path.iterdir())


def test_a_folder_of_something_else_is_refused(tmp_path: Path):
    with pytest.raises(FileNotFoundError, match=r"no hub folder \(shaver\.json\)"):
        shaver.load(tmp_path)
    with pytest.raises(FileNotFoundError, match=r"there is no shaver\.json"):
        pull(str(tmp_path))
    with pytest.raises(FileNotFoundError, match="write_folder"):
        push(tmp_path, "me/model")
    write_folder(nn.Linear(3, 2), tmp_path)
    with pytest.raises(ValueError, match=r"not how to build their network: pass factory="):
        shaver.load(tmp_path)
    with pytest.raises(ValueError, match="does not fit Linear"):
        shaver.load(tmp_path, factory=lambda: nn.Linear(4, 2))


def test_a_damaged_hub_folder_is_refused(tmp_path: Path):
    model = nn.Linear(3, 2)
    write_folder(model, tmp_path)
    file = tmp_path / "model.safetensors"
    content = file.read_bytes()
    file.write_bytes(content[:-3] + bytes([content[-3] ^ 4]) + content[-2:])
    with pytest.raises(ValueError, match="is damaged: its contents do not match"):
        shaver.load(tmp_path, factory=lambda: nn.Linear(3, 2))


def test_push_and_pull_ask_the_hub_for_what_is_no_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A hub made of a folder, with the two calls that are used."""
    model = nn.Linear(3, 2)
    write_folder(model, tmp_path / "local")
    asked: list[Any] = []

    class Api:
        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> str:
            asked.append((name, private, exist_ok))
            return f"hub:{name}"

        def upload_folder(self, *, folder_path: str, repo_id: str) -> None:
            (tmp_path / "hub").mkdir()
            for file in Path(folder_path).iterdir():
                (tmp_path / "hub" / file.name).write_bytes(file.read_bytes())

    class Hub:
        HfApi = Api

        @staticmethod
        def snapshot_download(name: str) -> str:
            assert name == "me/linear"
            return str(tmp_path / "hub")

    monkeypatch.setattr(hub, "_hub", lambda: Hub)
    assert push(tmp_path / "local", "me/linear") == "hub:me/linear"
    assert asked == [("me/linear", True, True)]
    again = pull("me/linear", factory=lambda: nn.Linear(3, 2))
    assert torch.equal(again.weight, model.weight)  # type: ignore[arg-type]
