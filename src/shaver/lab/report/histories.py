"""Training curves of a run: the ``history.csv`` of its cells, each with the training it belongs to."""

import csv
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shaver.io import read_json
from shaver.lab.report.summary import Experiment, Training, number, training_of

#: The columns that are shown, and what they are.
QUANTITIES = {
    "loss": "training loss",
    "log_evidence": "log evidence",
    "effective_parameters": "effective parameters",
    "relevant": "share of weights with S > 1",
}


@dataclass(frozen=True)
class History:
    """One network's training: what it was, and its numbers by epoch."""

    recipe: str
    task: str
    seed: str
    training: Training
    rows: Sequence[Mapping[str, Any]] = field(repr=False)

    def belongs_to(self, experiment: Experiment) -> bool:
        """Whether the experiment's rows come from networks like this one."""
        return (self.recipe, self.task) == (experiment.recipe, experiment.task)

    def column(self, key: str) -> list[tuple[float, float]]:
        """``(epoch, value)`` where there is a value."""
        pairs = ((number(row.get("epoch")), number(row.get(key))) for row in self.rows)
        return [(epoch, value) for epoch, value in pairs if epoch is not None and value is not None]

    @staticmethod
    def mean(histories: Sequence["History"], key: str) -> list[tuple[float, float]]:
        """The mean over seeds, at the epochs that every seed reached."""
        columns = [dict(history.column(key)) for history in histories]
        epochs = [epoch for epoch in columns[0] if all(epoch in column for column in columns)] if columns else []
        return [(epoch, statistics.fmean(column[epoch] for column in columns)) for epoch in epochs]


def read_histories(folder: Path, recipe: str, cells: Sequence[str]) -> list[History]:
    """Every training curve of a run, once a network.

    Cells that have none yet are left out, and so are networks that were pruned while they trained: each has a curve
    of its own for each sparsity.

    Args:
        folder: Of the run.
        recipe: Its name.
        cells: Those of the study as it is now; the folder may hold others of an earlier code or setting.
    """
    found: dict[tuple[str, str, Training], History] = {}
    for path in (folder / "cells" / cell / "history.csv" for cell in sorted(cells)):
        config = path.with_name("config.json")
        if not path.is_file():
            continue
        settings = read_json(config) if config.is_file() else {}
        training = settings.get("training") or {}
        if not training.get("labels") or training.get("online") is not None:
            continue
        with open(path, newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file))
        kind, seed = training_of(training["labels"]), str(training["labels"].get("seed", ""))
        found[settings["task"], seed, kind] = History(recipe, settings["task"], seed, kind, rows)
    return list(found.values())
