"""One cell of a study: a network is trained, or found in the store, then pruned and measured.

``config.json`` in the folder says what to do. ``status.json`` says how far it is, ``rows.csv`` grows criterion by
criterion, ``error.txt`` holds the traceback of a failure. A process that is killed at any moment leaves complete files,
and the next one continues from them.
"""

import json
import os
import queue
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import Any

from shaver.io import read_json, write_csv, write_json, write_text
from shaver.lab.recipes.grid import Cell
from shaver.lab.run.provenance import code_version, machine, versions
from shaver.lab.run.results import CONFIG, DENSE, ERROR, ROWS, STATUS, Row, link, read_rows

#: The file with the output of a cell's process.
LOG = "log.txt"
#: Seconds between two writes of the progress.
_SECONDS = 0.5
#: The share of a cell's work that is training, roughly; the rest is pruning and measuring.
_TRAINING = 0.6


def run_cell(folder: str, store: str, any_code: bool = False) -> None:
    """Do what ``folder/config.json`` says, or what is left of it."""
    place = Path(folder)
    (place / ERROR).unlink(missing_ok=True)
    status = _Status(place / STATUS)
    status("starting", 0, 0)
    try:
        _run(Cell.from_dict(read_json(place / CONFIG)), place, Path(store), any_code, status)
    except BaseException as error:
        if isinstance(error, Exception):
            write_text(place / ERROR, traceback.format_exc())
            status.write("failed", error=f"{type(error).__name__}: {error}")
        raise


def _run(cell: Cell, place: Path, store: Path, any_code: bool, status: "_Status") -> None:
    import torch

    from shaver.lab.run.networks import FILES, load_data, obtain
    from shaver.lab.run.stage_rows import evaluate, is_better_than_guessing

    torch.set_num_threads(1)
    training, code = cell.training, code_version("cell")
    data = load_data(training)
    trained, source = obtain(training, data, store, code=code_version("training"), any_code=any_code, report=status)
    for name in FILES:
        link(source / name, place / name)
    rows = [row for row in read_rows(place / ROWS) if any_code or row["code"] == code]
    common: Row = {"network": training.network["name"], "data": training.data["name"], "task": cell.task}
    common |= training.labels | {"stage": cell.stage.name, "epochs": trained.facts["epochs"], "code": code}
    common["train_seconds"] = trained.facts["train_seconds"]
    status.base = _TRAINING
    for part in evaluate(cell, trained, data, skip={row["criterion"] for row in rows}, report=status):
        if part[0]["criterion"] == DENSE:
            learned = is_better_than_guessing(part[0]["accuracy"], data.test.targets)
            common["learned"] = "yes" if learned else "no"
        elif rows:  # the dense network's row comes first, here or in an earlier process
            common["learned"] = rows[0].get("learned", "")
        rows += [common | row for row in part]
        write_csv(place / ROWS, rows)
    status.write("done", code=code, learned=rows[0].get("learned") != "no", accuracy=float(rows[0]["accuracy"]))


class _Status:
    """Writes ``status.json``: a note, the steps done, and the share of the cell's work that is done."""

    def __init__(self, path: Path) -> None:
        self._path, self._began, self._last = path, time.time(), 0.0
        started = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(self._began))
        self._fixed = {"pid": os.getpid(), "started": started, "machine": machine(), "versions": versions()}
        self.base = 0.0

    def __call__(self, note: str, done: int, of: int) -> None:
        if time.monotonic() - self._last >= _SECONDS:
            part = 1 - _TRAINING if self.base else _TRAINING
            share = self.base + part * (done / of if of else 0.0)
            self.write("running", note=note, done=done, of=of, share=round(share, 4))
            self._last = time.monotonic()

    def write(self, state: str, **facts: Any) -> None:
        seconds = round(time.time() - self._began, 2)
        write_json(self._path, {"state": state, **facts, "seconds": seconds, **self._fixed})


def serve() -> None:
    """Run the cells that standard input names, one per line. End when it closes, even during a cell.

    Standard input closes when whoever started this process has ended.
    """
    orders: queue.Queue[str] = queue.Queue()

    def listen() -> None:
        # not sys.stdin: its lock would make the interpreter's end fail
        for line in os.fdopen(0, "r", encoding="utf-8"):
            orders.put(line)
        os._exit(0)

    threading.Thread(target=listen, daemon=True).start()
    while True:
        folder, store, any_code = json.loads(orders.get())
        log = os.open(Path(folder) / LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        for stream in (1, 2):
            os.dup2(log, stream)
        os.close(log)
        try:
            run_cell(folder, store, any_code)
        except Exception:
            traceback.print_exc()
            sys.stderr.flush()


if __name__ == "__main__":
    serve()
