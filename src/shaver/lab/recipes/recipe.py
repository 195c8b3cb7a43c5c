"""Tasks (a network on its data) and recipes (how the networks of some tasks are trained and pruned)."""

import json
import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from shaver.naming import check_count, check_name, check_number

SCALES = ("cpu", "paper")
#: Methods of other papers that decide themselves how much they remove, see :mod:`shaver.lab.run.rivals`.
RIVALS = ("vd", "l0")
METHODS = ("map", "spam", "l1", *RIVALS)
PRIORS = ("parameter", "unit", "layer", "scalar")
#: Structure and source of SpaM's curvature. Diagonal MC and EF come from training's own passes at ``cpu`` scale;
#: the others, and all at ``paper`` scale, are estimated between epochs.
CURVATURES = ("diag-mc", "diag-ef", "diag-ggn", "kron-mc", "kron-ef", "kron-ggn")
STAGES = ("posthoc", "repaired", "finetuned", "online", "structured", "two-steps")
PAPER_SPARSITIES = (0.20, 0.40, 0.60, 0.70, 0.75, 0.80, 0.85, 0.90, 0.95, 0.99)
SPARSITIES = tuple(sorted((*PAPER_SPARSITIES, 0.97, 0.98, 0.995)))
#: Every registered criterion, in the order of the tables.
CRITERIA = ("opd", "obd", "magnitude", "snip", "grasp", "synflow", "wanda", "random")


def late_cosine(share: float) -> float:
    """The learning rate's factor: one during the first third of training, then down to zero along a cosine."""
    return 0.5 * (1 + math.cos(math.pi * max(0.0, 1.5 * share - 0.5)))


def two_cosines(share: float) -> float:
    """The learning rate's factor: down along a cosine until two thirds of training, and once more in the rest."""
    passed = 1.5 * share if share < 2 / 3 else 3 * share - 2
    return 0.5 * (1 + math.cos(math.pi * passed))


#: Schedules of the learning rate by name, as :func:`shaver.fit` takes them.
SCHEDULES: dict[str, str | Callable[[float], float]] = {
    "cosine": "cosine", "late cosine": late_cosine, "two cosines": two_cosines,
}  # fmt: skip


@dataclass(frozen=True)
class Stage:
    """One way to prune a trained network, and where."""

    # "posthoc" (after training, nothing else), "repaired" (then repaired from training samples, without training),
    # "finetuned" (then trained further with fixed masks), "online" (while training, one training for each sparsity),
    # "structured" (whole units, compacted), "two-steps" (by the posterior of two SpaM steps after training)
    name: str = "posthoc"
    criteria: tuple[str, ...] = CRITERIA  # which criteria; online pruning has its own (OPD with SpaM, else magnitude)
    sparsities: tuple[float, ...] = SPARSITIES  # shares to remove
    epochs: int = 0  # of fine-tuning, at the task's learning rate divided by 10
    methods: tuple[str, ...] = METHODS  # only networks that were trained by these

    def __post_init__(self) -> None:
        check_name("stage", self.name, STAGES)
        for criterion in self.criteria:
            check_name("criterion", criterion, CRITERIA)
        for method in self.methods:
            check_name("method", method, METHODS)
        if not self.sparsities or not all(0 < s < 1 for s in self.sparsities):
            raise ValueError(
                f"sparsities are shares between 0 and 1 (0.95 for 95 %), at least one, not {list(self.sparsities)}."
            )
        if self.epochs < (1 if self.name == "finetuned" else 0):
            raise ValueError(f"epochs of fine-tuning must be 1 or more, not {self.epochs}.")


@dataclass(frozen=True)
class Task:
    """A network on its data, and how it is trained at one scale."""

    name: str  # such as "lenet-mnist"
    title: str
    scale: str  # "cpu" or "paper"
    note: str  # what is smaller than in the paper; empty at paper scale
    # name and options for build_network
    network: dict[str, Any] = field(hash=False)
    data: str  # name for shaver.data.load
    epochs: int  # passes over the training data
    batch_size: int = 128  # samples per step
    optimizer: str = "sgd"  # "sgd", "adam" or "adamw"
    lr: float = 0.05  # its learning rate
    schedule: str = "cosine"  # of the learning rate, see SCHEDULES
    clip: float | None = None  # largest norm of a gradient; None is no limit
    samples: int | None = None  # number of training samples, drawn once; None is all
    augment: bool = False  # shift and mirror training images
    temperature: float = 1.0  # T; the paper's "Temp. 5" counts the data five times, which is T = 0.2.
    # of curvature estimates between epochs, and of the one that gives MAP networks their OPD scores
    source: str = "ggn"
    burn_in: int = 0  # epochs before the first estimate, where it is made between epochs
    frequency: int = 1  # epochs between two of them
    epoch_seconds: float = 0.0  # seconds per MAP epoch on one core, for the estimates of shaver list; 0 if unknown
    pass_seconds: float = 0.0  # seconds per pass over the test data
    length: int | None = None  # tokens per text; None for data other than texts
    test_samples: int | None = None  # number of test texts, drawn once; None is all
    scored: int = 512  # number of training texts for SNIP, GraSP and a curvature estimate after training
    # further options of SpaM, for trainings much shorter or longer than those its defaults are made for
    spam: dict[str, Any] = field(default_factory=dict, hash=False)
    # settings of the recipe that are different for this task: methods, priors, seeds, stages
    own: dict[str, Any] = field(default_factory=dict, hash=False)
    # further options of shaver.pruning.Online, for pruning while training
    online: dict[str, Any] = field(default_factory=dict, hash=False)

    def __post_init__(self) -> None:
        check_name("scale", self.scale, SCALES)
        check_name("optimizer", self.optimizer, ("sgd", "adam", "adamw"))
        check_name("schedule", self.schedule, SCHEDULES)
        check_name("source", self.source, ("ggn", "ef", "mc"))
        for name in ("epochs", "batch_size", "samples", "frequency", "length", "test_samples", "scored"):
            if (value := getattr(self, name)) is not None:
                check_count(name, value)
        check_number("lr", self.lr, least=0, above=True)


@dataclass(frozen=True)
class Recipe:
    """An experiment: a grid of trainings, and the prunings of each trained network.

    Example:
        >>> recipe = shaver.lab.get_recipe("lenet-mnist", "cpu")
        >>> recipe.override(epochs=5, seeds=1, priors=("parameter", "unit"))

    Attributes:
        name: What ``shaver run`` takes.
        title: For people.
        paper: The tables and figures of the paper that it stands for.
        scale: ``"cpu"`` or ``"paper"``.
        tasks: The networks and data.
        methods: How they are trained: ``"map"``, ``"spam"``, ``"l1"``, or a rival: ``"vd"`` (sparse variational
            dropout), ``"l0"`` (hard concrete gates). Rivals are for the online stage.
        priors: SpaM's priors.
        curvatures: SpaM's curvatures, see :data:`CURVATURES`.
        seeds: Number of seeds, starting with ``first_seed``.
        first_seed: The first seed.
        stages: How the networks are pruned.
        curves: Measure the test data after each epoch, for training curves; nothing is chosen by it.
    """

    name: str
    title: str
    paper: str
    scale: str
    tasks: tuple[Task, ...]
    methods: tuple[str, ...] = ("map", "spam")
    priors: tuple[str, ...] = ("parameter",)
    curvatures: tuple[str, ...] = ("diag-mc",)
    seeds: int = 3
    first_seed: int = 0
    stages: tuple[Stage, ...] = (Stage(),)
    curves: bool = True

    def __post_init__(self) -> None:
        for kind, given, valid in (
            ("method", self.methods, METHODS),
            ("prior", self.priors, PRIORS),
            ("curvature", self.curvatures, CURVATURES),
        ):
            if not given:
                raise ValueError(f"recipe {self.name!r} needs at least one {kind}.")
            for one in given:
                check_name(kind, one, valid)
        check_count("seeds", self.seeds)
        check_count("first_seed", self.first_seed, 0)
        if not self.tasks or not self.stages:
            raise ValueError(f"recipe {self.name!r} needs at least one task and one stage.")
        if set(RIVALS) & set(self.methods) and {stage.name for stage in self.stages} != {"online"}:
            raise ValueError(f"recipe {self.name!r}: {', '.join(RIVALS)} prune while they train; use stage 'online'.")
        if "l1" in self.methods and any(task.length for task in self.tasks):
            raise ValueError(f"recipe {self.name!r} trains language models: by map or spam, not by l1.")

    @property
    def note(self) -> str:
        """What is smaller than in the paper, task by task; empty at ``paper`` scale."""
        notes = [f"{task.title}: {task.note}" if len(self.tasks) > 1 else task.note for task in self.tasks if task.note]
        return "; ".join(notes)

    def override(self, **given: Any) -> "Recipe":
        """The recipe with some settings changed; ``None`` leaves a setting as it is.

        Args:
            given: Fields of :class:`Recipe`; fields of :class:`Task` (``epochs``, ``batch_size``, ``optimizer``,
                ``lr``, ``clip``, ``samples``), for every task; ``length``, ``test_samples``, ``scored``, ``weights``
                and ``vocabularies`` (folders), for language models; ``criteria`` and ``sparsities``, for every stage;
                ``tuning_epochs``; and ``tasks`` and ``stages`` by name, which choose among the recipe's own.

        Raises:
            ValueError: An unknown setting, or an impossible value.
        """
        for name in given:
            check_name("setting", name, _SETTINGS)

        def take(*names: str) -> dict[str, Any]:
            values = {name: given.pop(name, None) for name in names}
            plain = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
            return {name: value for name, value in plain.items() if value is not None}

        chosen = take("tasks", "stages")
        tasks = _choose("task", chosen.get("tasks"), self.tasks, self.name)
        stages = _choose("stage", chosen.get("stages"), self.stages, self.name)
        folders = {name: str(folder) for name, folder in take(*_FOLDERS).items()}
        of_text = take(*_TEXT_SETTINGS)
        if (folders or of_text) and not all(task.length for task in tasks):
            raise ValueError(f"recipe {self.name!r} uses no texts, so {', '.join(of_text | folders)} has no effect.")
        if folders:
            tasks = tuple(_with_folders(task, folders) for task in tasks)
        of_task = take(*_TASK_SETTINGS) | of_text
        tasks = tuple(replace(task, **of_task, note=_noted(task, of_task)) for task in tasks)
        of_stage, tuning = take("criteria", "sparsities"), take("tuning_epochs")
        stages = tuple(replace(stage, **of_stage) for stage in stages)
        if tuning:
            if not any(stage.epochs for stage in stages):
                raise ValueError(f"recipe {self.name!r} fine-tunes nothing, so tuning_epochs has no effect.")
            stages = tuple(replace(s, epochs=tuning["tuning_epochs"]) if s.epochs else s for s in stages)
        own = take(*_OWN)
        tasks = tuple(replace(t, own={k: v for k, v in t.own.items() if k not in own}) for t in tasks)
        return replace(self, tasks=tasks, stages=stages, **own)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as they are saved with the run."""
        plain: dict[str, Any] = json.loads(json.dumps(asdict(self)))
        return plain

    def __str__(self) -> str:
        lines = [f"{self.name} ({self.scale}): {self.title}; in the paper: {self.paper}"]
        for task in self.tasks:
            settings = f"{task.epochs} epochs, batch {task.batch_size}, {task.optimizer} at {task.lr:g}"
            lines.append(f"  {task.name}: {task.network} on {task.data}, {settings}")
            lines += [f"    smaller than the paper: {task.note}"] if task.note else []
        grid = (self.methods, self.priors, self.curvatures)
        lines.append("  " + " × ".join(" ".join(part) for part in grid) + f" × {self.seeds} seeds")
        for stage in self.stages:
            shares = " ".join(f"{100 * s:g}" for s in stage.sparsities)
            tuned = f", {stage.epochs} epochs of fine-tuning" if stage.epochs else ""
            lines.append(f"  {stage.name}: {' '.join(stage.criteria)} at {shares} %{tuned}")
        return "\n".join(lines)


_TASK_SETTINGS = ("epochs", "batch_size", "optimizer", "lr", "clip", "samples")
_TEXT_SETTINGS = ("length", "test_samples", "scored")
_FOLDERS = ("weights", "vocabularies")
_OWN = ("methods", "priors", "curvatures", "seeds", "first_seed", "curves")
#: Everything that :meth:`Recipe.override` takes.
_SETTINGS = (
    *("tasks", "stages", "criteria", "sparsities", "tuning_epochs"), *_OWN, *_TASK_SETTINGS, *_TEXT_SETTINGS, *_FOLDERS
)  # fmt: skip
#: How notes speak of epochs: "30 of 100 epochs", or "3 epochs".
_EPOCHS = r"\b\d+( of \d+)? epochs"
_WORDS = {
    "epochs": "epochs", "batch_size": "batch size", "optimizer": "optimizer", "lr": "learning rate",
    "clip": "norm of gradients at most", "samples": "training samples", "length": "tokens per text",
    "test_samples": "test samples", "scored": "texts for scores",
}  # fmt: skip
_PRETRAINED = ("distilbert", "gpt2")


def _noted(task: Task, changed: dict[str, Any]) -> str:
    """The note with the user's changes, so that no output hides them."""
    note = task.note
    for name, value in changed.items():
        old = getattr(task, name)
        if old == value:
            continue
        if name == "epochs" and re.search(_EPOCHS, note):
            note = re.sub(_EPOCHS, rf"{value}\1 epochs", note)
        else:
            instead = f" instead of {old}" if old is not None else ""
            note = ", ".join(filter(None, [note, f"{_WORDS[name]} {value}{instead}"]))
    return note


def _with_folders(task: Task, folders: dict[str, str]) -> Task:
    """The task with local folders; a network that should be pretrained and is not says so."""
    network = {**task.network, **folders}
    untrained = network["name"] in _PRETRAINED and "weights" not in network
    note = ", ".join(filter(None, [task.note, "random instead of pretrained weights"])) if untrained else task.note
    return replace(task, network=network, note=note)


def _choose(kind: str, wanted: Iterable[str] | None, among: tuple[Any, ...], recipe: str) -> tuple[Any, ...]:
    if wanted is None:
        return among
    by_name = {one.name: one for one in among}
    return tuple(by_name[check_name(f"{kind} of {recipe!r}", name, by_name)] for name in wanted)
