"""Results: one function reads run folders, and names what cannot be read."""

import json

import pytest

from shaver.io import write_csv
from shaver.lab import load_runs
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
        write_csv(place / "rows.csv", [{**ROW, "seed": seed}])
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
