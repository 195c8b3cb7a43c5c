"""The README's code runs, and its numbers come from somewhere."""

import re
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import shaver

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def blocks() -> list[str]:
    found = re.findall(r"```python\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(found) == 4
    return found


def test_the_first_screen_runs_as_it_stands_and_prints_such_a_table(blocks, capsys):
    exec(compile(blocks[0], "README.md", "exec"), {})
    printed = capsys.readouterr().out
    shown = re.search(r"```\n(parameter .*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert shown is not None

    def names(text: str) -> list[str]:
        return [line.split()[0] for line in text.splitlines()]

    assert names(printed) == names(shown[1])
    assert "achieved 0.9500" in printed
    (found,) = re.findall(r"test accuracy ([\d.]+)%", printed)
    text = README.read_text(encoding="utf-8")
    ((mean, spread),) = re.findall(r"12 seeds the test accuracy after pruning is ([\d.]+) ± ([\d.]+) %", text)
    # Other processors round differently and train another network: five standard deviations around the mean.
    assert abs(float(found) - float(mean)) <= 5 * float(spread)


def test_the_loop_of_ones_own_runs(blocks):
    data = shaver.data.load("digits")
    model = shaver.zoo.build("digits_cnn", seed=0)
    names = {
        "shaver": shaver, "F": F, "model": model, "train_set": data.train,
        "loader": list(data.train.batches(512)), "optimizer": torch.optim.SGD(model.parameters(), lr=0.01),
    }  # fmt: skip
    exec(compile(blocks[1].replace("range(30)", "range(2)"), "README.md", "exec"), names)
    assert names["spam"].posterior.precision().keys() == dict(model.named_parameters()).keys()


def test_a_trained_network_is_pruned_and_repaired(blocks):
    model = shaver.zoo.build("digits_cnn", seed=0)
    names = {"shaver": shaver, "model": model, "loader": list(shaver.data.load("digits").train.batches(512))}
    exec(compile(blocks[2], "README.md", "exec"), names)
    assert names["pruned"].achieved == pytest.approx(0.8, abs=1e-3)
    assert len(names["pruned"].repaired.layers) == 5


def test_what_is_made_small_is_loaded(blocks, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, model = shaver.data.load("digits"), shaver.zoo.build("digits_cnn", seed=0)
    history = shaver.fit(model, data.train, method="spam", epochs=1, batch_size=64, progress=False)
    names = {"shaver": shaver, "model": model, "history": history, "x": data.test[:8][0]}
    exec(compile(blocks[3], "README.md", "exec"), names)
    assert names["small"].fc1.out_features == names["again"].fc1.out_features == 32
    assert all(torch.equal(a, b) for a, b in zip(names["again"].parameters(), names["small"].parameters(), strict=True))


def test_the_links_lead_to_files():
    for target in re.findall(r"\]\(([^)]+)\)", README.read_text(encoding="utf-8")):
        assert (README.parent / target).exists(), target
