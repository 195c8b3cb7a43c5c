"""The demo: two small networks on embedded data, trained, pruned by every criterion, measured and shown."""

import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from torch import nn

import shaver.data
import shaver.zoo
from shaver import criteria
from shaver.curvature import estimate
from shaver.evidence import Posterior
from shaver.io import load_state, save_state, write_json
from shaver.lab.report.formats import FORMATS
from shaver.lab.report.report import write_report
from shaver.lab.report.summary import METHOD_NAMES
from shaver.lab.report.tables import cost_table, write_rows
from shaver.lab.run.demo_compact import show_compact
from shaver.lab.run.parallel import Report, run_jobs
from shaver.lab.run.provenance import code_version, machine, versions
from shaver.lab.run.results import COLUMNS
from shaver.lab.run.sweep import DENSE, SPARSITIES, Row, measure, sweep
from shaver.pruning import prune
from shaver.settings import Settings
from shaver.training import fit

METHODS = ("map", "spam")
#: Where the cost of the pruned network is shown.
SHOWN_SPARSITY = 0.95


@dataclass(frozen=True)
class Task:
    """A data set, the network for it, and how long it trains."""

    data: str
    network: dict[str, Any]
    title: str
    epochs: int = 100
    batch_size: int = 64
    lr: float = 0.1

    @property
    def name(self) -> str:
        """Network and data, as recipes name their tasks."""
        return f"{self.network['name']}-{self.data}"


TASKS = (
    Task(
        "cancer", {"name": "fcn", "inputs": 30, "hidden": [100, 100], "classes": 2}, "Breast cancer, FCN", batch_size=32
    ),
    Task("digits", {"name": "digits_cnn"}, "Digits, small CNN"),
)


@dataclass(frozen=True)
class Job:
    """One network: a task trained by a method under a seed."""

    task: Task
    method: str
    seed: int
    epochs: int
    out: str


@dataclass(frozen=True)
class Result:
    """What a job hands back: its rows, and how long it took."""

    rows: list[Row]
    seconds: float


def run_demo(
    out: Path, *, seed: int = 0, repeats: int = 3, epochs: int | None = None, processes: int = 2, console: Console
) -> list[Row]:
    """Train, prune and measure; write everything into ``out`` and show tables on the console.

    Args:
        out: The run folder: ``report.html``, ``tables/``, ``figures/``, ``pictures/``; ``results.csv`` and
            ``study.json`` as every study has them; ``cost.csv``; the trained networks with their posteriors in
            ``models/``, and how training went in ``cells/``; a compact one in ``compact/``.
        seed: The first seed; it decides the split, the initial weights and the order of the batches.
        repeats: Seeds in a row; tables and figure show the mean.
        epochs: Instead of each task's own number.
        processes: How many networks train at once.
        console: Where progress and tables appear.

    Returns:
        The rows of ``results.csv``.
    """
    if repeats < 1 or (epochs is not None and epochs < 1) or processes < 1:
        given = f"here repeats is {repeats}, epochs {epochs}, processes {processes}"
        raise ValueError(f"repeats, epochs and processes must be 1 or more; {given}.")
    began = time.perf_counter()
    (out / "models").mkdir(parents=True, exist_ok=True)
    # The longer task first, so that the processes end together.
    jobs = [
        Job(task, method, number, epochs or task.epochs, str(out))
        for task in reversed(TASKS)
        for method in METHODS
        for number in range(seed, seed + repeats)
    ]
    steps = len(criteria.names()) + 1
    named = [(f"{job.task.title}, {METHOD_NAMES[job.method]}", job, job.epochs + steps) for job in jobs]
    console.print(f"Training and pruning {len(jobs)} networks on {processes} processes …")
    results = run_jobs(run_job, named, processes=processes, console=console)
    order = {task.data: i for i, task in enumerate(TASKS)}
    rows = sorted((row for result in results for row in result.rows), key=lambda row: order[row["data"]])
    write_rows(out / "results.csv", [{name: row.get(name, "") for name in COLUMNS} for row in rows])
    costs = [row for task in TASKS for method in METHODS for row in _costs(out, task, method, seed)]
    write_rows(out / "cost.csv", costs)
    seconds = time.perf_counter() - began
    write_json(out / "study.json", _description(seed, repeats, epochs, processes, seconds, jobs, results))
    write_report([out], formats=[name for name in FORMATS if name != "html"], console=console)
    console.print(cost_table(costs))
    show_compact(out, seed=seed, epochs=epochs, console=console)
    write_report([out], formats=["html"], console=console)  # last: the page has the pictures of the compact network
    return rows


def run_job(job: Job, report: Report) -> Result:
    """Train one network, sweep it, and save what a later look needs."""
    began = time.perf_counter()
    data = shaver.data.load(job.task.data, seed=job.seed)
    model = shaver.zoo.build(**job.task.network, seed=job.seed)
    logger = _Reporter(report, f"seed {job.seed}")
    history = fit(
        model,
        data.train,
        method=job.method,
        epochs=job.epochs,
        lr=job.task.lr,
        batch_size=job.task.batch_size,
        seed=job.seed,
        logger=logger,
    )
    batches, test = data.train.batches(256), list(data.test.batches(256))
    posterior = history.posterior
    if posterior is None:  # MAP's prior is the unit Gaussian; its posterior needs the curvature at the end
        posterior = Posterior(estimate(model, batches), 1.0, dict(model.named_parameters()))
    example = test[0][0][:1]
    label = _label(job, sum(history.column("seconds")), len(history))
    rows: list[Row] = []
    parts = sweep(
        model, test, criteria=criteria.names(), posterior=posterior, batches=batches, example=example, seed=job.seed
    )
    for part in parts:
        rows += [label | row | {"bytes": row["bytes_sparse"]} for row in part]
        if part[0]["criterion"] == DENSE:
            rows[-1]["log_evidence"] = posterior.log_evidence
        report(1, f"seed {job.seed}  pruned by {part[0]['criterion']}")
    name = f"{job.out}/models/{_name(job.task, job.method, job.seed)}"
    save_state(f"{name}.safetensors", {"network": job.task.network, "weights": model.state_dict()})
    posterior.save(f"{name}-posterior.safetensors")
    cell = Path(job.out) / "cells" / _name(job.task, job.method, job.seed)
    settings = {"network": job.task.network, "data": {"name": job.task.data}, "labels": _training(job)}
    write_json(cell / "config.json", {"task": job.task.name, "training": settings})
    history.to_csv(cell / "history.csv")
    return Result(rows, time.perf_counter() - began)


def load_network(out: Path, task: Task, method: str, seed: int) -> tuple[nn.Module, Posterior]:
    """A trained network of a demo's run folder, and its posterior."""
    saved = load_state(out / "models" / f"{_name(task, method, seed)}.safetensors")
    model = shaver.zoo.build(**saved["network"])
    model.load_state_dict(saved["weights"])
    return model, Posterior.load(out / "models" / f"{_name(task, method, seed)}-posterior.safetensors")


def _name(task: Task, method: str, seed: int) -> str:
    return f"{task.data}-{method}-{seed}"


def _training(job: Job) -> dict[str, Any]:
    """How a job trains, in the words of the results; SpaM with its defaults."""
    prior, structure, source = ("parameter", "diag", Settings().source) if job.method == "spam" else ("", "", "")
    return {"method": job.method, "prior": prior, "structure": structure, "source": source, "seed": job.seed}


def _label(job: Job, seconds: float, epochs: int) -> Row:
    """What all rows of a job share."""
    named = {"recipe": "demo", "scale": "cpu", "task": job.task.name, "network": job.task.network["name"]}
    done = {"stage": "posthoc", "train_seconds": seconds, "epochs": epochs, "code": code_version()}
    return named | {"data": job.task.data} | _training(job) | done


def _costs(out: Path, task: Task, method: str, seed: int) -> list[Row]:
    """The cost of a dense network and of the same masked, measured when nothing else runs."""
    model, posterior = load_network(out, task, method, seed)
    test = list(shaver.data.load(task.data, seed=seed).test.batches(256))
    example = test[0][0][:1]
    label = {"data": task.data, "method": method, "seed": seed}
    scores = criteria.score(model, "opd", posterior=posterior)
    dense = label | {"sparsity": 0.0} | measure(model, test, example, latency=True)
    pruned = prune(model, scores, SHOWN_SPARSITY)
    return [dense, label | {"sparsity": pruned.achieved} | measure(model, test, example, latency=True)]


class _Reporter:
    """Turns the rows of training into steps of a bar."""

    def __init__(self, report: Report, label: str) -> None:
        self.report, self.label = report, label

    def log(self, row: dict[str, Any], step: int) -> None:
        self.report(1, f"{self.label}  epoch {step}  loss {row['loss']:.3f}")


def _description(
    seed: int, repeats: int, epochs: int | None, processes: int, seconds: float, jobs: list[Job], results: list[Result]
) -> dict[str, Any]:
    """What ``study.json`` says."""
    names = [_name(job.task, job.method, job.seed) for job in jobs]
    tasks = [asdict(task) | {"name": task.name, "epochs": epochs or task.epochs} for task in TASKS]
    return {
        "recipe": {
            "name": "demo",
            "title": "Two small networks, shaved",
            "scale": "cpu",
            "tasks": tasks,
            "methods": list(METHODS),
            "criteria": criteria.names(),
            "sparsities": list(SPARSITIES),
        },
        "cells": names,
        "seeds": list(range(seed, seed + repeats)),
        "processes": processes,
        "seconds": round(seconds, 2),
        "seconds_of_cells": {name: round(r.seconds, 2) for name, r in zip(names, results, strict=True)},
        "command": sys.argv,
        "versions": versions(),
        "machine": machine(),
    }
