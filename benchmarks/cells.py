"""Shared by pruning.py and structured.py: settings, data, networks, and running cells in parallel processes."""

import csv
import hashlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from spam import EXPERIMENTS

Row = dict[str, Any]
#: A function, and its arguments after the setting.
Cell = tuple[Callable[..., list[Row]], tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Settings that all cells share.

    Attributes:
        split: ``"test"``, or ``"valid"`` for results that a setting is chosen by.
        scale: Factor on the usual number of epochs.
        runs: The folder of trained networks.
        digest: Part of their names, from :func:`digest_of`.
    """

    split: str
    scale: float
    runs: str
    digest: str


def digest_of(*settings: object) -> str:
    """A short hash of the settings and of the library's source."""
    import shaver

    digest = hashlib.sha256(repr(settings).encode())
    for path in sorted(Path(shaver.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return digest.hexdigest()[:10]


def data_of(setting: Setting, name: str, seed: int) -> dict[str, Any]:
    """The ``train`` data, ``judged`` batches, ``example`` (two inputs) and untrained ``model`` of an experiment."""
    import torch

    import shaver

    torch.set_num_threads(1)
    experiment = EXPERIMENTS[name]
    splits = shaver.data.load(
        experiment.data,
        seed=seed if experiment.data == "cancer" else 0,
        valid_fraction=0.1 if setting.split == "valid" else 0.0,
    )
    judged = (splits.valid if setting.split == "valid" else splits.test).batches(1000)
    model = shaver.zoo.build(experiment.network, seed=seed, **dict(experiment.arguments))
    return {"train": splits.train, "judged": judged, "example": next(iter(judged))[0][:2], "model": model}


def posterior_of(found: dict[str, Any]) -> Any:
    """SpaM's posterior; for MAP, one from a curvature estimate after training, with MAP's prior."""
    import shaver

    if found["posterior"] is not None:
        return found["posterior"]
    curvature = shaver.curvature.estimate(found["model"], found["train"].batches(256))
    return shaver.Posterior(curvature, 1.0, dict(found["model"].named_parameters()))


def run_cells(setting: Setting, cells: Sequence[Cell], jobs: int) -> Iterator[list[Row]]:
    """The rows of each cell as soon as it is done. Cells run in ``jobs`` parallel processes."""
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        running = {pool.submit(function, setting, *args): (function.__name__, *args) for function, args in cells}
        for number, job in enumerate(as_completed(running), 1):
            rows = job.result()
            print(f"{number}/{len(cells)}", *running[job], flush=True)
            yield rows


def write(path: Path, rows: Sequence[Row]) -> None:
    """Write a CSV file with every column that occurs in any row."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns)
        writer.writeheader()
        writer.writerows(rows)
