"""The cells of a recipe. A cell is one trained network, pruned in one way; its name is a hash of its settings."""

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from itertools import product
from typing import Any

from shaver.lab.recipes.recipe import RIVALS, Recipe, Stage, Task

#: Data sets whose split into training and test follows the seed; the others have a split of their own.
_SPLIT_BY_SEED = ("cancer", "digits")
#: Seconds of an epoch over those of a MAP epoch, by structure and source, as measured for LeNet.
_RATIOS = {"": 1.0, "diag-mc": 1.1, "diag-ef": 1.1, "diag-ggn": 5.1, "kron-mc": 3.0, "kron-ef": 3.0, "kron-ggn": 5.1}
#: The same for the rivals, which sample weights or outputs.
_RIVAL_RATIOS = {"vd": 3.0, "l0": 2.5}
#: A process imports torch and reads its data.
_START = 5.0
#: A search for λ trains five networks for a third of the epochs.
_SEARCH = 5 / 3


@dataclass(frozen=True)
class Training:
    """Everything a trained network depends on but the code; plain values."""

    network: dict[str, Any]  # name and options for build_network
    # name, seed of the split, augmentation and number of samples; for texts as
    # load_reviews takes them
    data: dict[str, Any]
    # Options of shaver.fit; for L1, a coefficient of None is searched for. online holds options
    # of shaver.pruning.Online.
    fit: dict[str, Any]
    labels: dict[str, Any]  # method, prior, structure, source and seed, as they stand in the results
    temperature: float  # of the likelihood
    source: str  # of a curvature estimate after training
    online: float | None  # sparsity to reach while training, or None
    curves: bool  # whether the test data are measured after each epoch

    @property
    def key(self) -> str:
        """A hash of the settings."""
        return _digest(asdict(self))


@dataclass(frozen=True)
class Cell:
    """One trained network and one way to prune it: what one process does."""

    task: str  # name of the task, for people
    training: Training
    stage: Stage  # the pruning

    @property
    def key(self) -> str:
        """The name of the cell's folder: a hash of everything but the code and the recipe that asked for it."""
        return _digest({"training": asdict(self.training), "stage": asdict(self.stage)})

    @property
    def label(self) -> str:
        """One line for people."""
        named = self.training.labels
        parts = [self.task, named["method"], named["prior"], f"{named['structure']} {named['source']}".strip()]
        if self.stage.name != "posthoc":
            parts.append(
                self.stage.name if self.training.online is None else f"online {100 * self.training.online:g} %"
            )
        return ", ".join(filter(None, parts)) + f", seed {named['seed']}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, the contents of the cell's ``config.json``."""
        return {"task": self.task, "training": asdict(self.training), "stage": asdict(self.stage)}

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> "Cell":
        """Undo :meth:`as_dict`, also after JSON."""
        stage: dict[str, Any] = {
            key: tuple(value) if isinstance(value, list) else value for key, value in plain["stage"].items()
        }
        return cls(plain["task"], Training(**plain["training"]), Stage(**stage))


def cells_of(recipe: Recipe) -> list[Cell]:
    """The cells of a recipe, seed by seed, so that an interrupted study has whole seeds rather than whole methods."""
    found: dict[str, Cell] = {}
    parts = [(replace(recipe, tasks=(task,), **task.own), task) for task in recipe.tasks]
    for seed, (part, task) in product(range(max(part.seeds for part, _ in parts)), parts):
        if seed >= part.seeds:
            continue
        seed += part.first_seed
        for (method, prior, curvature), stage in product(_trainings(part), part.stages):
            online = stage.name == "online"
            if method not in stage.methods or (online and method == "l1"):
                continue  # L1 makes zeros by itself; there is nothing to schedule
            stages = [Stage("online", stage.criteria, (s,)) for s in stage.sparsities] if online else [stage]
            for done in stages[:1] if method in RIVALS else stages:
                # a rival finds its own sparsity in one training
                target = done.sparsities[0] if online and method not in RIVALS else None
                training = _training(task, method, prior, curvature, seed, target, recipe.curves)
                cell = Cell(task.name, training, done)
                found[cell.key] = cell
    return list(found.values())


def _trainings(recipe: Recipe) -> Iterator[tuple[str, str, str]]:
    """Method, prior and curvature; only SpaM has a choice of the last two."""
    for method in recipe.methods:
        choices = product(recipe.priors, recipe.curvatures) if method == "spam" else [("", "")]
        yield from ((method, prior, curvature) for prior, curvature in choices)


def _training(
    task: Task, method: str, prior: str, curvature: str, seed: int, online: float | None, curves: bool
) -> Training:
    structure, _, source = curvature.partition("-")
    options: dict[str, Any] = {
        "method": method,
        "epochs": task.epochs,
        "batch_size": task.batch_size,
        "optimizer": task.optimizer,
        "lr": task.lr,
        "seed": seed,
    }
    if method == "spam":
        options["spam"] = {"prior": prior, "structure": structure, **_learning(task, structure, source), **task.spam}
    if method == "map" and "initial_precision" in task.spam:  # the prior that SpaM starts from
        options["precision"] = task.spam["initial_precision"]
    if task.clip is not None:
        options["clip"] = task.clip
    if task.schedule != "cosine":
        options["schedule"] = task.schedule
    if method == "l1":
        options["l1"] = None
    if online is not None and task.online:
        options["online"] = dict(task.online)
    data = {"name": task.data, "augment": task.augment, "samples": task.samples}
    data["seed"] = seed if task.data in _SPLIT_BY_SEED else 0
    if task.length is not None:
        data |= {"length": task.length, "test_samples": task.test_samples, "scored": task.scored}
    labels = {"method": method, "prior": prior, "structure": structure, "source": source, "seed": seed}
    return Training(task.network, data, options, labels, task.temperature, task.source, online, curves)


def _learning(task: Task, structure: str, source: str) -> dict[str, Any]:
    """SpaM's settings: the paper's algorithm at its scale, our defaults at ours."""
    if task.scale == "paper":
        return {
            "source": source,
            "online": False,
            "burn_in": task.burn_in,
            "frequency": task.frequency,
            "freeze": 1.0,
            "shrink": 0.0,
            "proximal": False,
            "method": "gradient",
            "temperature": task.temperature,
        }
    settings: dict[str, Any] = {"source": source, "temperature": task.temperature, "debias": False}
    if structure == "kron" or source == "ggn":  # between epochs: there is no online form of these
        settings |= {"online": False, "burn_in": task.burn_in, "frequency": task.frequency, "shrink": 0.0}
        if task.epochs - task.burn_in < 2:  # a single estimate comes at the very end
            settings["freeze"] = 1.0
    return settings


def _digest(value: object) -> str:
    text = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def expected_seconds(recipe: Recipe) -> float | None:
    """Wall time on two cores with nothing done before; ``None`` where a task was never timed."""
    seconds = seconds_by_cell(recipe)
    return None if seconds is None else (len(seconds) * _START + sum(seconds.values())) / 2


def seconds_by_cell(recipe: Recipe) -> dict[str, float] | None:
    """Key of a cell → its expected time on one core; ``None`` where a task was never timed.

    Of cells that share a trained network, the first one trains it.
    """
    tasks = {task.name: task for task in recipe.tasks}
    if not all(task.epoch_seconds for task in recipe.tasks):
        return None
    trained: set[str] = set()
    seconds = {}
    for cell in cells_of(recipe):
        task = tasks[cell.task]
        training = 0.0 if cell.training.key in trained else _training_seconds(cell, task)
        seconds[cell.key] = training + _evaluation_seconds(cell, task)
        trained.add(cell.training.key)
    return seconds


def _training_seconds(cell: Cell, task: Task) -> float:
    labels = cell.training.labels
    ratio = _RATIOS[f"{labels['structure']}-{labels['source']}".strip("-")]
    ratio *= _RIVAL_RATIOS.get(labels["method"], 1.0)
    epochs = task.epochs * (1 + _SEARCH if labels["method"] == "l1" else 1)
    return epochs * (task.epoch_seconds * ratio + (task.pass_seconds if cell.training.curves else 0))


def _evaluation_seconds(cell: Cell, task: Task) -> float:
    stage = cell.stage
    points = len(stage.sparsities) * (1 if stage.name == "online" else len(stage.criteria))
    # GraSP is the most expensive score: 3.6 epochs of LeNet. The others together take about one epoch.
    # Language models score on some of their texts.
    share = 1.0 if task.length is None or task.samples is None else min(1.0, task.scored / task.samples)
    scores = 0.0 if stage.name == "online" else 5 * share * task.epoch_seconds
    return scores + points * (task.pass_seconds + stage.epochs * task.epoch_seconds)
