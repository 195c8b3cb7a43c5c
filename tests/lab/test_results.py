"""Results: one function reads run folders; what cannot be read is named; a version changes when the code does."""

import json
from pathlib import Path

import pytest

import shaver
from shaver.lab import load_runs
from shaver.lab.report.tables import write_rows
from shaver.lab.run import provenance
from shaver.lab.run.results import COLUMNS, collect

ROW = {"network": "fcn", "data": "cancer", "method": "map", "prior": "", "structure": "", "source": "", "seed": 0,
       "stage": "posthoc", "criterion": "opd", "sparsity": 0.9, "achieved": 0.9, "accuracy": 1 / 3, "nll": 0.1,
       "ece": 0.1, "brier": 0.1, "log_evidence": float("nan"), "nonzeros": 10, "parameters": 100, "bytes": 60,
       "flops": 200, "train_seconds": 1.0, "score_seconds": 0.1, "epochs": 3, "code": "00e1",
       "task": "tiny"}  # fmt: skip


def make_run(folder, states=("done",), recipe="tiny"):
    cells = [f"cell{i}" for i in range(len(states))]
    for seed, (key, state) in enumerate(zip(cells, states, strict=True)):
        place = folder / "cells" / key
        place.mkdir(parents=True)
        write_rows(place / "rows.csv", [{**ROW, "seed": seed}])
        (place / "status.json").write_text(json.dumps({"state": state}))
    (folder / "study.json").write_text(json.dumps({"recipe": {"name": recipe, "scale": "cpu"}, "cells": cells}))
    return folder


def test_folders_are_loaded_into_one_frame(tmp_path):
    one, two = make_run(tmp_path / "a"), make_run(tmp_path / "b", ("done", "done"), recipe="other")
    assert (collect(one), collect(two)) == (1, 2)
    frame = load_runs(one, two)
    assert tuple(frame.columns) == COLUMNS
    assert list(frame.recipe) == ["tiny", "other", "other"]
    assert list(frame.seed) == [0, 0, 1]


def test_values_come_back_as_they_were_written(tmp_path):
    folder = make_run(tmp_path / "a")
    collect(folder)
    (row,) = load_runs(folder).to_dict("records")
    assert row["accuracy"] == 1 / 3, "exact to the last digit"
    assert row["prior"] == "", "an empty name is no missing number"
    assert row["code"] == "00e1", "a version that looks like a number stays text"
    assert isinstance(row["parameters"], int)
    assert row["log_evidence"] != row["log_evidence"]
    assert row["latency_ms"] != row["latency_ms"]


def test_only_finished_cells_are_in_the_table(tmp_path):
    folder = make_run(tmp_path / "a", ("running", "done", "failed", "interrupted"))
    assert collect(folder) == 1
    assert list(load_runs(folder).seed) == [1]


def test_a_table_of_an_earlier_grid_does_not_stay(tmp_path):
    folder = make_run(tmp_path / "a", ("running",))
    for name in ("results.csv", "results.parquet"):
        (folder / name).write_text("old")
    assert collect(folder) == 0
    assert not (folder / "results.csv").exists()
    with pytest.raises(ValueError, match="has no results yet"):
        load_runs(folder)


def test_a_folder_that_is_none_of_ours_is_named_with_those_inside(tmp_path):
    make_run(tmp_path / "runs" / "tiny-cpu")
    with pytest.raises(FileNotFoundError, match=r"holds no study\.json.* Did you mean .*tiny-cpu\?"):
        load_runs(tmp_path / "runs")
    with pytest.raises(FileNotFoundError, match="nowhere is not a folder"):
        load_runs(tmp_path / "nowhere")
    with pytest.raises(ValueError, match="at least one folder"):
        load_runs()


@pytest.mark.parametrize("text", ["", "a,b\n1,2\n", "\x00\x01"])
def test_a_damaged_table_is_named(tmp_path, text):
    folder = make_run(tmp_path / "a")
    (folder / "results.csv").write_text(text)
    with pytest.raises(ValueError, match=r"results\.csv cannot be read .* it is damaged"):
        load_runs(folder)


@pytest.mark.parametrize("text", ["{", "[1]", '{"cells": []}'])
def test_a_damaged_study_is_named(tmp_path, text):
    folder = make_run(tmp_path / "a")
    (folder / "study.json").write_text(text)
    with pytest.raises(ValueError, match=r"study\.json"):
        load_runs(folder)


@pytest.fixture
def copy_of_the_code(tmp_path, monkeypatch):
    """A package with one file in a room that matters, and one in a room that does not."""
    (tmp_path / "curvature").mkdir()
    monkeypatch.setattr(shaver, "__file__", str(tmp_path / "__init__.py"))

    def version_with(source, of="posthoc", name="curvature/engine.py"):
        (tmp_path / name).write_text(source)
        provenance.code_version.cache_clear()
        provenance._meaning.cache_clear()
        return provenance.code_version(of)

    yield version_with
    provenance.code_version.cache_clear()
    provenance._meaning.cache_clear()


def test_the_version_changes_with_what_the_code_does_and_not_with_what_is_said_about_it(copy_of_the_code):
    version = copy_of_the_code('"""Says."""\ndef f(x):\n    """Doubles."""\n    return 2 * x\n')
    assert version == copy_of_the_code('"""Says more."""\n\ndef f(x):  # a comment\n    """Twice."""\n    return 2*x\n')
    assert version != copy_of_the_code('"""Says."""\ndef f(x):\n    """Doubles."""\n    return 3 * x\n')


def test_every_room_that_counts_exists():
    root = Path(shaver.__file__).parent
    assert [room for room in provenance._STRUCTURE if not (root / room).exists()] == []


def test_the_command_line_does_not_change_the_version(copy_of_the_code):
    version = copy_of_the_code("x = 1\n")
    assert copy_of_the_code("y = 1\n", name="cli.py") == version


def test_versions_and_machine_are_told():
    assert provenance.versions()["shaver"] == shaver.__version__
    assert provenance.machine()["cores"] >= 1
