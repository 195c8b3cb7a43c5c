"""One cell of a study, in a process of its own: ``python -m shaver.lab.run.cell FOLDER``.

The folder's ``config.json`` says what to do. ``status.json`` says how far it is, ``rows.csv`` grows criterion by
criterion, ``error.txt`` holds the traceback of a failure. A process that is killed at any moment leaves files that
are whole, and the next one goes on from them.
"""

import argparse
import csv
import os
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from shaver.io import read_json, write_json, write_text
from shaver.lab.recipes.grid import Cell
from shaver.lab.run.provenance import code_version, machine, versions

CONFIG, STATUS, ROWS, ERROR = "config.json", "status.json", "rows.csv", "error.txt"
#: Progress is written at most so often.
_SECONDS = 0.5


def run_cell(folder: str, store: str, any_code: bool = False) -> None:
    """Do what ``folder/config.json`` says, or what is left of it.

    Args:
        folder: The cell's folder.
        store: The folder of all trained networks.
        any_code: Keep what other code has made.

    Raises:
        Exception: Whatever went wrong; it is in ``status.json`` and ``error.txt`` as well.
    """
    place = Path(folder)
    began = time.time()
    (place / ERROR).unlink(missing_ok=True)
    status = _Status(place / STATUS, began)
    status("starting", 0, 0)
    try:
        _run(Cell.from_dict(read_json(place / CONFIG)), place, Path(store), any_code, status)
    except BaseException as error:
        if isinstance(error, Exception):
            write_text(place / ERROR, traceback.format_exc())
            status.end("failed", error=f"{type(error).__name__}: {error}")
        raise


def _run(cell: Cell, place: Path, store: Path, any_code: bool, status: "_Status") -> None:
    import torch

    from shaver.lab.report.tables import write_rows
    from shaver.lab.run.evaluation import evaluate
    from shaver.lab.run.store import FILES, link, load_data, obtain

    torch.set_num_threads(1)
    stage, training = cell.stage.name, cell.training
    code = code_version(stage)
    trained_by = code_version("training" if training.online is None else "online")
    data = load_data(training)
    trained, source = obtain(training, data, store, code=trained_by, any_code=any_code, report=status)
    for name in FILES:
        link(source / name, place / name)
    rows = [row for row in read_rows(place / ROWS) if any_code or row["code"] == code]
    common: dict[str, Any] = {"network": training.network["name"], "data": training.data["name"], "task": cell.task}
    common |= training.labels | {"stage": stage, "epochs": trained.facts["epochs"], "code": code}
    common["train_seconds"] = trained.facts["train_seconds"]
    done = {row["criterion"] for row in rows}
    for part in evaluate(cell, trained, data, skip=done, report=status):
        rows += [common | row for row in part]
        write_rows(place / ROWS, rows)
    status.end("done", code=code)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of an earlier process, as text; none if there is no file."""
    if not path.is_file():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


class _Status:
    """Writes ``status.json``."""

    def __init__(self, path: Path, began: float) -> None:
        self._path, self._began, self._last = path, began, 0.0
        self._fixed = {"pid": os.getpid(), "started": _stamp(began), "machine": machine(), "versions": versions()}

    def __call__(self, note: str, done: int, of: int) -> None:
        if time.monotonic() - self._last >= _SECONDS:
            self._write(state="running", note=note, done=done, of=of)
            self._last = time.monotonic()

    def end(self, state: str, **facts: Any) -> None:
        self._write(state=state, **facts)

    def _write(self, **facts: Any) -> None:
        write_json(self._path, facts | {"seconds": round(time.time() - self._began, 2)} | self._fixed)


def _stamp(seconds: float) -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(seconds))


def _end_with_parent() -> None:
    """Whoever started the cell holds the other end of standard input; when it is gone, nobody waits for this cell."""
    while os.read(0, 4096):  # not sys.stdin: its lock, held here, would make the interpreter's own end fail
        pass
    os._exit(70)


def main() -> None:
    """Read the command line, and run the cell."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="the cell's folder, with config.json")
    parser.add_argument("--store", required=True, help="the folder of all trained networks")
    parser.add_argument("--any-code", action="store_true", help="keep what other code has made")
    parser.add_argument("--end-with-parent", action="store_true", help="end when standard input is closed")
    asked = parser.parse_args()
    if asked.end_with_parent:
        threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        run_cell(asked.folder, asked.store, asked.any_code)
    except Exception:
        traceback.print_exc()
        sys.exit(1)


if __name__ == "__main__":
    main()
