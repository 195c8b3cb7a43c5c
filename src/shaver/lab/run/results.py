"""The results of a study as one tidy table: a row for each cell, criterion and sparsity."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaver.io import atomic_path, read_json
from shaver.lab.run.cell import CONFIG, ROWS, STATUS, read_rows

if TYPE_CHECKING:
    from pandas import DataFrame

STUDY, CSV, PARQUET = "study.json", "results.csv", "results.parquet"
_TEXT = (
    "recipe",
    "scale",
    "network",
    "data",
    "method",
    "prior",
    "structure",
    "source",
    "stage",
    "criterion",
    "code",
    "task",
)
_WHOLE = ("seed", "nonzeros", "parameters", "bytes", "flops", "epochs", "bytes_dense", "flops_sparse", "tuning_epochs")
#: The columns of every table. ``latency_ms`` is a call with 128 samples (of texts: one) on one thread, measured where
#: the arithmetic differs (dense and structured networks). ``log_evidence`` is the dense network's plus the change that
#: the removal makes under the diagonal model. ``epochs`` are those of training, ``tuning_epochs`` those after pruning.
COLUMNS = (
    *("recipe", "scale", "network", "data", "method", "prior", "structure", "source", "seed", "stage"),
    *("criterion", "sparsity", "achieved", "accuracy", "nll", "ece", "brier", "log_evidence"),
    *("nonzeros", "parameters", "bytes", "flops", "latency_ms", "train_seconds", "score_seconds", "epochs", "code"),
    *("task", "bytes_dense", "flops_sparse", "tuning_epochs"),
)


def load_runs(*folders: str | Path) -> "DataFrame":
    """The results of one or more run folders as one data frame.

    Example:
        >>> frame = load_runs("runs/lenet-mnist-cpu", "runs/fcn-mnist-cpu")     # doctest: +SKIP
        >>> frame.query("criterion == 'opd'").groupby(["method", "sparsity"]).accuracy.mean()  # doctest: +SKIP

    Args:
        folders: Folders of ``shaver run``. A row that several of them share (recipes share networks) appears once
            for each, under that recipe's name.

    Returns:
        The columns :data:`COLUMNS`; missing numbers are NaN, missing names empty.

    Raises:
        FileNotFoundError: A folder is not there, or no folder of a study.
        ValueError: A file in it is damaged, or there are no results yet.
        ImportError: Pandas is missing.
    """
    pandas = _pandas()
    if not folders:
        raise ValueError("load_runs needs at least one folder, such as runs/lenet-mnist-cpu.")
    frames = [_load(Path(folder)) for folder in folders]
    return pandas.concat(frames, ignore_index=True)


def read_study(folder: Path) -> dict[str, Any]:
    """A folder's ``study.json``.

    Raises:
        FileNotFoundError: There is none.
        ValueError: It is damaged.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder} is not a folder; `shaver list` shows what has been run.")
    if not (folder / STUDY).is_file():
        inside = sorted(str(path.parent) for path in folder.glob(f"*/{STUDY}"))
        hint = f" Did you mean {' '.join(inside[:4])}?" if inside else ""
        raise FileNotFoundError(f"{folder} holds no {STUDY}, so it is no folder of `shaver run`.{hint}")
    study = read_json(folder / STUDY)
    if not isinstance(study, dict) or not {"recipe", "cells"} <= study.keys():
        raise ValueError(f"{folder / STUDY} does not describe a study; it is damaged or of another kind.")
    return study


def collect(folder: Path) -> int:
    """Gather the rows of the study's finished cells into ``results.csv`` and ``results.parquet``; how many they are.

    Without pandas or pyarrow the CSV alone is written.
    """
    study = read_study(folder)
    recipe = study["recipe"]
    rows: list[dict[str, Any]] = []
    for key in study["cells"]:
        place = folder / "cells" / key
        if read_status(place).get("state") == "done":
            rows += [{"recipe": recipe["name"], "scale": recipe["scale"], **row} for row in read_rows(place / ROWS)]
    if not rows:
        for name in (CSV, PARQUET):  # of an earlier grid: they would speak of something else
            (folder / name).unlink(missing_ok=True)
        return 0
    _write_csv(folder / CSV, rows)
    try:
        import pyarrow  # noqa: F401

        frame = _typed(_pandas().read_csv(folder / CSV, keep_default_na=False, dtype=str))
    except ImportError:
        (folder / PARQUET).unlink(missing_ok=True)
        return len(rows)
    with atomic_path(folder / PARQUET) as temporary:
        frame.to_parquet(temporary, index=False)
    return len(rows)


def read_status(place: Path) -> dict[str, Any]:
    """A cell's ``status.json``; empty if there is none, or none that can be read."""
    try:
        status = read_json(place / STATUS)
    except (OSError, ValueError):
        return {}
    return status if isinstance(status, dict) else {}


def _load(folder: Path) -> "DataFrame":
    read_study(folder)
    pandas = _pandas()
    if not (folder / CSV).is_file():
        raise ValueError(f"{folder} has no results yet: no cell is done. `shaver run` with the same recipe continues.")
    try:
        frame = pandas.read_csv(folder / CSV, keep_default_na=False, dtype=str)
        missing = [name for name in COLUMNS if name not in frame.columns]
        if missing:
            raise ValueError(f"it lacks the column {missing[0]!r}")
        return _typed(frame)
    except ValueError as error:
        raise ValueError(
            f"{folder / CSV} cannot be read ({error}); it is damaged. Delete it and repeat `shaver run`, which makes "
            f"it again from the finished cells."
        ) from error


def _typed(frame: "DataFrame") -> "DataFrame":
    """Text stays text (an empty prior is an empty string); counts are whole if none is missing, the rest floats."""
    for name in frame.columns:
        if name in _TEXT:
            continue
        numbers = frame[name].map(lambda text: float(text or "nan")).astype(float)
        frame[name] = numbers.astype("int64") if name in _WHOLE and not numbers.isna().any() else numbers
    return frame


def _write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    from shaver.lab.report.tables import write_rows

    write_rows(path, [{name: row.get(name, "") for name in COLUMNS} for row in rows])


def _pandas() -> Any:
    try:
        import pandas
    except ImportError as error:
        raise ImportError('the table of results needs pandas: pip install "shaver[report]".') from error
    return pandas


__all__ = ["COLUMNS", "CONFIG", "CSV", "PARQUET", "STUDY", "collect", "load_runs", "read_status", "read_study"]
