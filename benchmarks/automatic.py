"""Automatic sparsity beside other rules that need no threshold and no validation data, on eight small tasks.

    python benchmarks/automatic.py                       # docs/results/automatic.csv and the table
    python benchmarks/automatic.py --tasks wine cancer --seeds 5

Every network is trained by SpaM (which learns one prior precision δ per weight) and pruned by each rule. The knee is
the highest sparsity of the curve of OPD (optimal posterior damage) that loses at most 0.15 points of test accuracy.

auto      The library's rule: G ≥ 0.153 nats stays, and a twentieth of ½Σγ limits the expected rise of the loss.
budget    The same with a quarter of ½Σγ (budget=0.25), the library's earlier limit.
S > 1     Prior and data weigh the same at S = 1; no limit on the rise of the loss.
ESS       Effective sample size (Kish) of the scores: keeps the (ΣS)² / ΣS² weights with the highest S.
BMR       Bayesian model reduction under the learned δ: removes every weight with G ≤ 0.
"""

import argparse
import csv
import math
import statistics
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shaver
import shaver.data
from shaver import zoo
from shaver.criteria import score
from shaver.data import InMemory
from shaver.evidence import Posterior
from shaver.pruning import Masks, Ranking
from shaver.pruning.automatic import weigh

TOLERATED = 0.15
GRID = [x / 100 for x in range(50, 90)] + [x / 500 for x in range(450, 500)]
FIELDS = ("task", "seed", "rule", "dense", "sparsity", "accuracy", "knee")
Scores = dict[str, Tensor]
#: From a network, its posterior and its scores to the weights to keep.
Rule = Callable[[nn.Module, Posterior, Scores], Masks]


@dataclass(frozen=True)
class Task:
    """A network on a data set, with the length of its training."""

    network: dict[str, Any]
    data: str
    epochs: int
    batch: int = 64
    samples: int | None = None
    seeds: int = 2


def _fcn(inputs: int, hidden: list[int], classes: int) -> dict[str, Any]:
    return {"name": "fcn", "inputs": inputs, "hidden": hidden, "classes": classes}


TASKS = {
    "wine": Task(_fcn(13, [50, 50], 3), "wine", 100, 32, seeds=10),
    "cancer": Task(_fcn(30, [100, 100], 2), "cancer", 100, seeds=5),
    "digits FCN": Task(_fcn(64, [100], 10), "digits", 60, seeds=5),
    "digits CNN": Task({"name": "digits_cnn"}, "digits", 40),
    "MNIST FCN": Task(_fcn(784, [256], 10), "mnist", 15, samples=10_000),
    "MNIST LeNet": Task({"name": "lenet"}, "mnist", 10, samples=10_000),
    "Fashion FCN": Task(_fcn(784, [256], 10), "fashion", 15, samples=10_000),
    "Fashion LeNet": Task({"name": "lenet"}, "fashion", 10, samples=10_000),
}


def data_of(task: Task, seed: int) -> tuple[InMemory, InMemory]:
    """Training and test data. Small data sets are split 80/20 by the seed."""
    if task.data == "wine":
        from sklearn.datasets import load_wine

        x, y = (torch.from_numpy(part) for part in load_wine(return_X_y=True))
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(seed))
        train, test = order[: len(x) * 4 // 5], order[len(x) * 4 // 5 :]
        x = ((x - x[train].mean(0)) / x[train].std(0)).float()
        return InMemory(x[train], y[train]), InMemory(x[test], y[test])
    splits = shaver.data.load(task.data, seed=seed if task.data in ("cancer", "digits") else 0)
    if task.samples is None:
        return splits.train, splits.test
    x, y = splits.train[
        torch.randperm(len(splits.train), generator=torch.Generator().manual_seed(seed))[: task.samples]
    ]
    return InMemory(x, y), splits.test


def automatic(model: nn.Module, posterior: Posterior, scores: Scores) -> Masks:
    """The library's own rule."""
    return Masks(weigh(model, posterior, scores).kept())


def generous(model: nn.Module, posterior: Posterior, scores: Scores) -> Masks:
    """The library's rule with a larger budget."""
    return Masks(weigh(model, posterior, scores).kept(budget=0.25))


def plain(model: nn.Module, posterior: Posterior, scores: Scores) -> Masks:
    """S > 1 stays."""
    return Masks({name: values > 1 for name, values in scores.items()})


def sample_size(model: nn.Module, posterior: Posterior, scores: Scores) -> Masks:
    """As many weights stay as the scores have effective samples."""
    flat = torch.cat([values.flatten() for values in scores.values()]).double()
    kept = math.ceil(float(flat.sum().square() / flat.square().sum()))
    return Ranking(scores).at(1 - kept / len(flat))


def reduced(model: nn.Module, posterior: Posterior, scores: Scores) -> Masks:
    """Weights that bring no evidence under the learned δ are removed."""
    return Masks({name: gain > 0 for name, gain in weigh(model, posterior, scores).gains.items()})


RULES: dict[str, Rule] = {
    "auto": automatic,
    "budget 0.25": generous,
    "S > 1": plain,
    "ESS": sample_size,
    "BMR": reduced,
}


def accuracy(model: nn.Module, masks: Masks | None, test: InMemory) -> float:
    """Test accuracy in % with the masks applied to a copy."""
    model = deepcopy(model)
    if masks is not None:
        masks.apply_(model)
    return 100 * float(shaver.measure.quality(model, test.batches(1000)).accuracy)


def measure(name: str, seed: int) -> list[dict[str, Any]]:
    """Train one network and prune it by every rule."""
    task = TASKS[name]
    train, test = data_of(task, seed)
    model = zoo.build(**task.network, seed=seed)
    options = {"epochs": task.epochs, "batch_size": task.batch, "seed": seed, "progress": False}
    posterior = shaver.fit(model, train, **options).posterior
    assert posterior is not None
    scores = score(model, "opd", posterior=posterior)
    dense = accuracy(model, None, test)
    curve = dict(zip(GRID, map(Ranking(scores).at, GRID), strict=True))
    lost = {sparsity: dense - accuracy(model, masks, test) for sparsity, masks in curve.items()}
    knee = max((s for s in GRID if all(lost[t] <= TOLERATED + 1e-9 for t in GRID if t <= s)), default=0.0)
    rows = []
    for rule, select in RULES.items():
        masks = select(model, posterior, scores)
        row = {"task": name, "seed": seed, "rule": rule, "dense": dense, "knee": 100 * knee}
        rows.append(row | {"sparsity": 100 * masks.sparsity, "accuracy": accuracy(model, masks, test)})
    return rows


def table(rows: list[dict[str, Any]]) -> str:
    """For each task and rule: accuracy lost / sparsity reached, means over seeds."""
    lines = ["| task | seeds | dense | knee | " + " | ".join(RULES) + " |", "|---|---|---|---|" + "---|" * len(RULES)]
    for task in dict.fromkeys(row["task"] for row in rows):
        mine = [row for row in rows if row["task"] == task]
        mean = lambda key, part: statistics.mean(float(row[key]) for row in part)  # noqa: E731
        cells = []
        for rule in RULES:
            part = [row for row in mine if row["rule"] == rule]
            cells.append(f"{mean('dense', part) - mean('accuracy', part):.2f} / {mean('sparsity', part):.1f}")
        seeds = len({row["seed"] for row in mine})
        lines.append(
            f"| {task} | {seeds} | {mean('dense', mine):.2f} | {mean('knee', mine):.1f} | " + " | ".join(cells) + " |"
        )
    return "\n".join(lines)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--seeds", type=int, help="number of seeds; default: between 2 and 10, by task")
    parser.add_argument("--out", type=Path, default=Path("docs/results/automatic.csv"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    if options.out.exists():
        rows = [row for row in csv.DictReader(options.out.open()) if row["task"] not in options.tasks]
    for task in options.tasks:
        for seed in range(options.seeds or TASKS[task].seeds):
            rows += [
                {k: f"{v:.3f}" if isinstance(v, float) else v for k, v in row.items()} for row in measure(task, seed)
            ]
            with options.out.open("w", newline="") as file:
                writer = csv.DictWriter(file, FIELDS)
                writer.writeheader()
                writer.writerows(rows)
    print(table(rows))


if __name__ == "__main__":
    main()
