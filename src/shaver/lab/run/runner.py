"""Runs a recipe: plans its cells, starts what is not done, watches, and gathers the results.

Everything that matters is in files, so the runner can be killed at any moment and started again: finished cells are
found by their contents, also those of other recipes in the same parent folder, and the rest continues.
"""

import shlex
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from rich.console import Console

from shaver.io import read_json, write_json
from shaver.lab.recipes.grid import Cell, cells_of
from shaver.lab.recipes.language import check_folders
from shaver.lab.recipes.recipe import Recipe
from shaver.lab.run.engines import Engine, LocalEngine, Running
from shaver.lab.run.networks import is_trained
from shaver.lab.run.progress import Progress
from shaver.lab.run.provenance import code_version, machine, versions
from shaver.lab.run.results import (
    CELLS,
    CONFIG,
    CSV,
    ERROR,
    ROWS,
    STATUS,
    STUDY,
    collect,
    link,
    read_status,
    read_study,
)

NETWORKS = "networks"
_SECONDS = 0.2
_LOCK = ".lock"


@dataclass
class Outcome:
    """The result of a study."""

    folder: Path  # the run folder
    done: int = 0  # cells that are finished, those of earlier calls included
    ran: int = 0  # how many of them this call ran
    failed: dict[str, str] = field(default_factory=dict)  # label of a cell → its error
    # label of a cell → test accuracy of its network, where that is no better than guessing
    unlearned: dict[str, float] = field(default_factory=dict)
    rows: int = 0  # rows in the table of results
    kept: Path | None = None  # where the earlier table of results is, if the folder held one of other settings


def default_folder(recipe: Recipe) -> Path:
    """The default folder of a recipe's results."""
    return Path("runs") / f"{recipe.name}-{recipe.scale}"


def run_study(
    recipe: Recipe,
    folder: Path | None = None,
    *,
    engine: Engine | None = None,
    any_code: bool = False,
    store: Path | None = None,
    console: Console | None = None,
) -> Outcome:
    """Run every cell of a recipe that is not done, and write the table of results after each.

    Example:
        >>> outcome = run_study(get_recipe("fcn-cancer").override(seeds=1))
        >>> load_runs(outcome.folder)

    A failed cell does not stop the others. Ctrl-C ends the running cells and leaves files from which the next call
    continues.

    Args:
        recipe: What to run.
        folder: The run folder.
        engine: Where the cells run; by default a process for each core.
        any_code: Keep finished cells, and continue interrupted ones, of other versions of the code.
        store: The folder of trained networks; ``networks`` beside the run folder if left out, where other recipes find
            them.
        console: Where progress appears; ``None`` is silent.

    Raises:
        ValueError: Another run is at work in the folder, or a file in it is damaged; or a language model lacks its
            vocabulary.
        FileNotFoundError: A folder of weights or vocabularies is not there.
        KeyboardInterrupt: After Ctrl-C, when everything is in order.
    """
    folder = default_folder(recipe) if folder is None else folder
    chosen: Engine = LocalEngine() if engine is None else engine
    console = Console(quiet=True) if console is None else console
    for task in recipe.tasks:
        if task.length is not None:
            check_folders(**task.network)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        alone = FileLock(folder / _LOCK).acquire(timeout=0)
    except Timeout:
        raise ValueError(
            f"another shaver run is at work in {folder}; wait for it, or choose another folder with --out."
        ) from None
    with alone:
        cells = cells_of(recipe)
        kept = _keep_earlier_table(folder, cells)
        write_json(folder / STUDY, _description(recipe, cells))
        for cell in cells:
            _prepare(cell, folder, any_code)
        run = _Run(folder, cells, chosen, any_code, store or folder.parent / NETWORKS, Progress(console, recipe, cells))
        run.outcome.kept = kept
        try:
            return run.run()
        finally:
            if engine is None:
                chosen.close()


class _Run:
    """One call of :func:`run_study`."""

    def __init__(
        self, folder: Path, cells: list[Cell], engine: Engine, any_code: bool, store: Path, progress: Progress
    ) -> None:
        self.folder, self.engine, self.any_code, self.store, self.progress = folder, engine, any_code, store, progress
        self.waiting: list[Cell] = []
        self.running: dict[str, tuple[Cell, Running]] = {}
        self.outcome = Outcome(folder)
        for cell in cells:
            if is_done(self.place(cell), any_code):
                status = read_status(self.place(cell))
                self.count_done(cell, status)
                progress.set(cell, {**status, "earlier": True})
            else:
                self.waiting.append(cell)

    def place(self, cell: Cell) -> Path:
        return self.folder / CELLS / cell.key

    def run(self) -> Outcome:
        self.outcome.rows = collect(self.folder)
        with self.progress:
            try:
                while self.waiting or self.running:
                    self.start()
                    time.sleep(_SECONDS)
                    self.watch()
            except BaseException:
                self.stop()
                raise
            finally:
                self.outcome.rows = collect(self.folder)
                self.note_seconds()
        return self.outcome

    def start(self) -> None:
        while len(self.running) < self.engine.slots and (cell := self.next()) is not None:
            self.waiting.remove(cell)
            place = self.place(cell)
            write_json(place / STATUS, {"state": "waiting"})
            self.running[cell.key] = (cell, self.engine.start(place, self.store, self.any_code))

    def next(self) -> Cell | None:
        """The first cell that need not wait for a running cell to train the network they share."""
        training = {cell.training.key for cell, _ in self.running.values()}
        ready = (
            cell for cell in self.waiting if cell.training.key not in training or is_trained(self.store, cell.training)
        )
        return next(ready, None)

    def watch(self) -> None:
        for key, (cell, process) in list(self.running.items()):
            ended = process.poll()
            status = read_status(self.place(cell))
            if ended is None:
                self.progress.set(cell, status)
                continue
            del self.running[key]
            self.end(cell, status, ended)
        self.progress.refresh()

    def end(self, cell: Cell, status: dict[str, Any], ended: str) -> None:
        if status.get("state") == "done":
            self.count_done(cell, status)
            self.outcome.ran += 1
        else:
            if status.get("state") != "failed":  # it ended before it could write a reason
                reason = ended or "it ended without a result; see log.txt"
                status = {**status, "state": "failed", "error": reason}
                write_json(self.place(cell) / STATUS, status)
                (self.place(cell) / ERROR).write_text(reason + "\n", encoding="utf-8")
            self.outcome.failed[cell.label] = status["error"]
        self.progress.set(cell, status)
        self.outcome.rows = collect(self.folder)

    def count_done(self, cell: Cell, status: dict[str, Any]) -> None:
        self.outcome.done += 1
        if status.get("learned") is False:
            self.outcome.unlearned[cell.label] = status["accuracy"]

    def note_seconds(self) -> None:
        """Put the time that the cells took together into ``study.json``."""
        study = read_study(self.folder)
        seconds = [read_status(self.folder / CELLS / key).get("seconds", 0.0) for key in study["cells"]]
        write_json(self.folder / STUDY, {**study, "seconds": round(sum(seconds), 1)})

    def stop(self) -> None:
        for cell, process in self.running.values():
            process.stop()
            status = read_status(self.place(cell))
            if status.get("state") not in ("done", "failed"):
                write_json(self.place(cell) / STATUS, {**status, "state": "interrupted"})


def is_done(place: Path, any_code: bool = False) -> bool:
    """Whether a folder holds a finished cell, made by the present code."""
    status = read_status(place)
    if status.get("state") != "done" or not (place / ROWS).is_file():
        return False
    return any_code or status.get("code") == code_version("cell")


def _keep_earlier_table(folder: Path, cells: list[Cell]) -> Path | None:
    """Rename the table of results if it has cells that are not part of this study; return its new name."""
    if not (folder / STUDY).exists():
        return None
    earlier = read_study(folder)
    if set(earlier["cells"]) <= {cell.key for cell in cells} or not (folder / CSV).is_file():
        return None
    stamp = str(earlier.get("started", "earlier")).replace(":", "-")
    kept = folder / f"results-{stamp}.csv"
    (folder / CSV).rename(kept)
    return kept


def _prepare(cell: Cell, folder: Path, any_code: bool) -> None:
    """Give the cell its folder and configuration, and take over what another recipe has finished."""
    place = folder / CELLS / cell.key
    place.mkdir(parents=True, exist_ok=True)
    config = place / CONFIG
    wanted = cell.as_dict()
    if not config.is_file() or Cell.from_dict(read_json(config)) != Cell.from_dict(wanted):
        write_json(config, wanted)
    if is_done(place, any_code):
        return
    for other in sorted(folder.absolute().parent.glob(f"*/{CELLS}/{cell.key}")):
        if other != place.absolute() and is_done(other, any_code):
            names = [path.name for path in other.iterdir() if path.name not in (CONFIG, STATUS) and path.is_file()]
            for name in names:
                link(other / name, place / name)
            link(other / STATUS, place / STATUS)  # last: it says that the rest is there
            return


def _description(recipe: Recipe, cells: list[Cell]) -> dict[str, Any]:
    return {
        "recipe": recipe.as_dict(),
        "note": recipe.note,
        "cells": [cell.key for cell in cells],
        "labels": {cell.key: cell.label for cell in cells},
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "seeds": list(range(recipe.first_seed, recipe.first_seed + recipe.seeds)),
        "code": {of: code_version(of) for of in ("training", "cell")},
        "versions": versions(),
        "machine": machine(),
        "started": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def at_work(folder: Path) -> bool:
    """Whether some process runs a study in this folder right now."""
    try:
        with FileLock(folder / _LOCK).acquire(timeout=0):
            return False
    except Timeout:
        return True
