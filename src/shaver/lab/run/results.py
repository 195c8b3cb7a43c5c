"""The results of a run on disk: the names of its files, and how its rows are read, written and gathered."""

import csv
import os
import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaver.io import atomic_path, read_json, write_csv
from shaver.naming import require

if TYPE_CHECKING:
    from pandas import DataFrame

#: A row of results: one trained network under one criterion at one sparsity.
Row = dict[str, Any]
#: The criterion of the row that describes the dense network.
DENSE = "dense"
#: The files of a run folder.
STUDY, CSV, PARQUET, CELLS = "study.json", "results.csv", "results.parquet", "cells"
#: The files of a cell's folder.
CONFIG, STATUS, ROWS, ERROR = "config.json", "status.json", "rows.csv", "error.txt"

_TEXT = (
    *("recipe", "scale", "network", "data", "method", "prior", "structure", "source", "stage", "criterion"),
    *("code", "task", "learned"),
)
_WHOLE = ("seed", "nonzeros", "parameters", "bytes", "flops", "epochs", "bytes_dense", "flops_sparse", "tuning_epochs")
#: The columns of every table. ``latency_ms`` is one call with 128 samples (one text for language models) on one
#: thread, measured where the arithmetic differs: for dense and structured networks. ``log_evidence`` is that of the
#: dense network plus the change that the removal makes under the diagonal model. ``epochs`` are those of training,
#: ``tuning_epochs`` those after pruning. ``learned`` is "no" for a network that is no better than guessing before it
#: is pruned; reports leave it out of their means and say so.
COLUMNS = (
    *("recipe", "scale", "network", "data", "method", "prior", "structure", "source", "seed", "stage"),
    *("criterion", "sparsity", "achieved", "accuracy", "nll", "ece", "brier", "log_evidence"),
    *("nonzeros", "parameters", "bytes", "flops", "latency_ms", "train_seconds", "score_seconds", "epochs", "code"),
    *("task", "bytes_dense", "flops_sparse", "tuning_epochs", "learned"),
)


def read_study(folder: Path) -> dict[str, Any]:
    """The ``study.json`` of a run folder."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; `shaver list` shows what has been run.")
    if not (folder / STUDY).is_file():
        inside = sorted(str(path.parent) for path in folder.glob(f"*/{STUDY}"))
        hint = f" Did you mean {' '.join(inside[:4])}?" if inside else ""
        raise FileNotFoundError(f"{folder} holds no {STUDY}, so `shaver run` did not write it.{hint}")
    study = read_json(folder / STUDY)
    if not isinstance(study, dict) or not {"recipe", "cells"} <= study.keys():
        raise ValueError(f"{folder / STUDY} does not describe a study; it is damaged or of another kind.")
    return study


def read_status(place: Path) -> dict[str, Any]:
    """The ``status.json`` of a cell; empty if there is none, or none that can be read."""
    try:
        status = read_json(place / STATUS)
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def read_rows(path: Path) -> list[Row]:
    """The rows of a CSV file as text; none if there is no file."""
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def link(source: Path, target: Path) -> None:
    """Give a file a second name, or copy it where the file system has no links. Files of cells are never changed."""
    target.unlink(missing_ok=True)
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


def collect(folder: Path) -> int:
    """Gather the rows of all finished cells into ``results.csv`` and ``results.parquet``, and return their number.

    Without pandas or pyarrow only the CSV file is written.
    """
    study = read_study(folder)
    recipe = {"recipe": study["recipe"]["name"], "scale": study["recipe"]["scale"]}
    rows: list[Row] = []
    for key in study["cells"]:
        place = folder / CELLS / key
        if read_status(place).get("state") == "done":
            rows += [recipe | row for row in read_rows(place / ROWS)]
    (folder / PARQUET).unlink(missing_ok=True)
    if not rows:
        (folder / CSV).unlink(missing_ok=True)  # it would describe other settings
        return 0
    write_csv(folder / CSV, [{name: row.get(name, "") for name in COLUMNS} for row in rows])
    try:
        import pyarrow  # noqa: F401

        frame = read_table(folder)
    except ImportError:
        return len(rows)
    with atomic_path(folder / PARQUET) as temporary:
        frame.to_parquet(temporary, index=False)
    return len(rows)


def read_table(folder: Path) -> "DataFrame":
    """The ``results.csv`` of a run folder, with typed columns: missing numbers are NaN, missing names empty."""
    pandas = require("pandas", "the table of results", "report")
    if not (folder / CSV).is_file():
        raise ValueError(f"{folder} has no results yet: no cell is done. `shaver run` with the same recipe continues.")
    try:
        frame = pandas.read_csv(folder / CSV, keep_default_na=False, dtype=str)
        missing = [name for name in COLUMNS if name not in frame.columns]
        if missing:
            raise ValueError(f"it lacks the column {missing[0]!r}")
        for name in (name for name in frame.columns if name not in _TEXT):
            numbers = frame[name].map(lambda text: float(text or "nan")).astype(float)
            frame[name] = numbers.astype("int64") if name in _WHOLE and not numbers.isna().any() else numbers
    except ValueError as error:
        raise ValueError(
            f"{folder / CSV} cannot be read ({error}); it is damaged. Delete it and repeat `shaver run`, which makes "
            f"it again from the finished cells."
        ) from error
    return frame
