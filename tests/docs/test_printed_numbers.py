"""Numbers in README and guides are those of the settings, the files and the pages of results that they speak of."""

import re
from pathlib import Path

import pytest

import shaver
from shaver.pruning import Online
from shaver.repairing.repaired import DAMPING
from shaver.settings import Settings
from shaver.timetable import IDLE, LATEST, pace

ROOT = Path(__file__).parents[2]


def words(page: str) -> str:
    """A page as one line."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def found(pattern: str, page: str) -> list[float]:
    """The numbers of the only place that matches."""
    (numbers,) = re.findall(pattern, words(page))
    return [float(number) for number in ([numbers] if isinstance(numbers, str) else numbers)]


def test_the_guide_to_training_names_the_defaults():
    page = "docs/guides/training.md"
    defaults = Settings().completed(has_own=True, weights=1, data_size=1, total_steps=1000)
    latest, settled, freeze = found(
        r"after (\d+) % of the steps at the latest, and δ stays fixed during the last (\d+) % \(`freeze=([\d.]+)`\)",
        page,
    )
    assert (latest / 100, 1 - settled / 100, freeze) == pytest.approx(
        (LATEST * defaults.learned_until, defaults.learned_until, defaults.freeze), abs=0.005
    )
    every, update, rarely, unknown = found(
        r"every (\d+)th step \(`every`\) and updates δ every (\d+) steps \(`update`\). After the freeze it measures on "
        r"every (\d+)th step, and on every \d+th near the end; if .*?, on every (\d+)th",
        page,
    )
    assert (every, update) == pace(defaults, 10_000)
    assert (rarely, unknown) == (IDLE**2 * every, IDLE * every)


def test_the_guide_to_pruning_names_the_schedule_and_the_size_on_disk(tmp_path):
    page = "docs/guides/pruning.md"
    start, end = found(r"schedule between (\d+) % and (\d+) % of training", page)
    assert (start / 100, end / 100) == (Online(0.9).start, Online(0.9).end)
    (smaller,) = found(r"A LeNet at 99 % is \[(\d+) times smaller\]", page)
    model = shaver.zoo.build("lenet", seed=0)
    dense = 4 * sum(p.numel() for p in model.parameters())
    masks = shaver.prune(model, shaver.score(model, "magnitude"), 0.99).masks
    stored = sum(file.stat().st_size for file in shaver.save(model, tmp_path / "small", masks).iterdir())
    assert dense / stored == pytest.approx(smaller, rel=0.1)


def test_the_guide_to_repair_names_the_damping():
    assert found(r"damping Λ is (\d+) % of the mean", "docs/guides/repair.md") == [100 * DAMPING]


@pytest.mark.parametrize("page", ["README.md", "docs/guides/smaller.md"])
def test_whole_units_removed_during_training(page):
    """README and guide round what the page of results says at the ratio that they name."""
    results, text = (ROOT / "docs/results/structured.md").read_text(encoding="utf-8"), words(page)
    (ratio,) = re.findall(r"([\d.]+) times fewer FLOPs", text)
    for name in ("gradual, SpaM, unit prior", "from scratch"):
        ((mean, error),) = re.findall(
            rf"\| (?:\*\*)?{name}(?:\*\*)? \|[^|]*\| ÷ {ratio} \|[^|]*\| ([\d.]+) ± ([\d.]+)", results
        )
        assert f"{float(mean):.1f} ± {float(error):.1f} %" in text


def test_repaired_networks_of_the_readme_are_those_of_the_results():
    readme, results = words("README.md"), words("docs/results/repair.md")
    shown = re.findall(r"[\d.]+", re.findall(r"\| magnitude with repair \|([^\n]*?) Published", readme)[0])
    assert len(shown) == 4
    for number in shown:
        assert number in results
