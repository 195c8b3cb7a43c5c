"""From tidy rows to what is shown: experiments, their trainings and curves, means with standard errors over seeds."""

import math
import re
import statistics
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from shaver.lab.run.folder import DENSE, Row

METHOD_NAMES = {"map": "MAP", "l1": "L1", "spam": "SpaM"}
CRITERION_NAMES = {
    "opd": "OPD",
    "obd": "OBD",
    "magnitude": "magnitude",
    "snip": "SNIP",
    "grasp": "GraSP",
    "synflow": "SynFlow",
    "wanda": "Wanda",
    "random": "random",
}
PRIOR_NAMES = {"scalar": "scalar", "layer": "layer-wise", "unit": "unit-wise", "parameter": "parameter-wise"}
STRUCTURE_NAMES = {"diag": "Diag", "kron": "KFAC"}
SOURCE_NAMES = {"ggn": "GGN", "ef": "EF", "mc": "MC"}
STAGE_NAMES = {
    "posthoc": "post hoc",
    "finetuned": "fine-tuned",
    "online": "online",
    "structured": "structured",
    "two-steps": "two SpaM steps after training",
}
NETWORK_NAMES = {
    "fcn": "FCN",
    "lenet": "LeNet",
    "digits_cnn": "small CNN",
    "mixer": "MLP-Mixer",
    "resnet18": "ResNet-18",
    "resnet18_fixup": "Fixup ResNet-18",
    "wrn16": "WRN-16",
    "wrn16_fixup": "Fixup WRN-16",
    "vit": "ViT",
    "distilbert": "DistilBERT",
    "gpt2": "GPT-2",
    "minilm": "MiniLM",
    "small-gpt": "small GPT",
}
DATA_NAMES = {
    "cancer": "breast cancer",
    "digits": "digits",
    "mnist": "MNIST",
    "fashion": "FashionMNIST",
    "cifar10": "CIFAR-10",
    "cifar100": "CIFAR-100",
    "imdb": "IMDB",
}


@dataclass(frozen=True)
class Metric:
    """A measure of quality: its column, how it is written, and which direction is good."""

    key: str
    title: str
    factor: float
    digits: int
    lower_is_better: bool

    def text(self, value: float, digits: int | None = None) -> str:
        """The value as tables show it."""
        return f"{value * self.factor:.{self.digits if digits is None else digits}f}"


METRICS = (
    Metric("accuracy", "test accuracy, %", 100.0, 2, lower_is_better=False),
    Metric("nll", "negative log likelihood", 1.0, 3, lower_is_better=True),
    Metric("ece", "calibration error (ECE), %", 100.0, 2, lower_is_better=True),
    Metric("brier", "Brier score", 1.0, 3, lower_is_better=True),
)
#: Every column that is averaged over seeds.
MEASURED = (
    *(metric.key for metric in METRICS),
    "achieved", "log_evidence", "nonzeros", "parameters", "bytes", "flops", "latency_ms", "train_seconds",
    "score_seconds", "epochs",
)  # fmt: skip
#: What a row is, apart from its numbers: no two rows of a report share all of these.
IDENTITY = (
    "recipe", "task", "scale", "network", "data", "method", "prior", "structure", "source", "seed", "stage",
    "criterion", "sparsity",
)  # fmt: skip


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds; the standard error of the mean is ``None`` for a single seed."""

    mean: float
    error: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """Summarise; the spread is the sample standard deviation, so that the error is std / √n."""
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(statistics.fmean(values), error, len(values))


@dataclass(frozen=True)
class Training:
    """How networks were trained: the method and, where there was a choice, the prior and the curvature."""

    method: str
    prior: str = ""
    structure: str = ""
    source: str = ""

    @property
    def method_name(self) -> str:
        """MAP, L1 or SpaM; anything else as it is."""
        return METHOD_NAMES.get(self.method, self.method)

    @property
    def prior_name(self) -> str:
        """The paper's word for the prior."""
        return PRIOR_NAMES.get(self.prior, self.prior)

    @property
    def curvature_name(self) -> str:
        """Structure and source, such as “KFAC GGN”."""
        names = (STRUCTURE_NAMES.get(self.structure, self.structure), SOURCE_NAMES.get(self.source, self.source))
        return " ".join(name for name in names if name)


@dataclass(frozen=True)
class Curve:
    """One line of a figure: what was trained, when and by what it was pruned, and its numbers at each sparsity."""

    training: Training
    stage: str
    criterion: str
    points: Mapping[float, Mapping[str, Estimate]]

    def values(self, key: str) -> dict[float, Estimate]:
        """One column over the sparsities that have it."""
        return {s: found[key] for s, found in self.points.items() if key in found}


@dataclass(frozen=True)
class Experiment:
    """One task (a network on its data) under one recipe, with everything measured for it."""

    recipe: str
    task: str
    title: str
    rows: Sequence[Row] = field(repr=False)
    curves: Sequence[Curve] = field(repr=False)
    trainings: Sequence[Training]
    dense: Mapping[Training, Mapping[str, Estimate]] = field(repr=False)

    @property
    def slug(self) -> str:
        """For file names and anchors."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    @property
    def seeds(self) -> list[str]:
        """The seeds in it."""
        return sorted({str(row["seed"]) for row in self.rows})

    @property
    def stages(self) -> list[str]:
        """The stages with curves, in order."""
        return in_order((curve.stage for curve in self.curves), STAGE_NAMES)

    @property
    def criteria(self) -> list[str]:
        """The criteria with curves, in order."""
        return in_order(curve.criterion for curve in self.curves)

    def sparsities(self, stage: str | None = None) -> list[float]:
        """Every sparsity that was asked for, the dense network's zero apart."""
        return sorted({s for c in self.curves if stage in (None, c.stage) for s in c.points if s > 0})

    def main_training(self, method: str) -> Training | None:
        """The training that stands for its method: parameter-wise and diagonal where there is a choice."""
        found = [training for training in self.trainings if training.method == method]
        return min(found, key=lambda t: (t.prior != "parameter", t.structure != "diag"), default=None)

    def main_trainings(self) -> list[Training]:
        """One training a method."""
        methods = dict.fromkeys(training.method for training in self.trainings)
        return [training for method in methods if (training := self.main_training(method)) is not None]


def in_order(given: Iterable[str], known: Iterable[str] = tuple(CRITERION_NAMES)) -> list[str]:
    """The names without repeats: the known ones in their order, then the others."""
    found, order = list(dict.fromkeys(given)), list(known)
    return [name for name in order if name in found] + [name for name in found if name not in order]


def experiments(rows: Sequence[Row], titles: Mapping[tuple[str, str], str] | None = None) -> list[Experiment]:
    """Rows of results, sorted into experiments; a title names the recipe only where two would be the same.

    Args:
        rows: The tidy rows.
        titles: Recipe and task → title, where there is one; else network and data make it.

    Raises:
        ValueError: Two different rows claim to be the same measurement.
    """
    groups: dict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in _unique(rows):
        groups[row["recipe"], task_of(row)].append(row)
    named = {
        (recipe, task): (titles or {}).get((recipe, task)) or _title(part[0]["network"], part[0]["data"])
        for (recipe, task), part in groups.items()
    }
    found = []
    for (recipe, task), part in groups.items():
        title = named[recipe, task]
        if list(named.values()).count(title) > 1:
            title = f"{title} ({recipe})"
        found.append(_experiment(recipe, task, title, part))
    return found


def task_of(row: Mapping[str, Any]) -> str:
    """What a row's network was trained for."""
    return str(row.get("task") or f"{row['network']}-{row['data']}")


def _experiment(recipe: str, task: str, title: str, rows: Sequence[Row]) -> Experiment:
    groups: dict[tuple[Training, str, str], dict[float, list[Row]]] = defaultdict(lambda: defaultdict(list))
    dense: dict[Training, dict[str, Row]] = defaultdict(dict)
    for row in rows:
        training = training_of(row)
        if row["criterion"] == DENSE:  # the same network may be measured before each way to prune it
            dense[training].setdefault(str(row["seed"]), row)
        else:
            groups[training, row["stage"], row["criterion"]][float(row["sparsity"])].append(row)
    whole = {training: _estimates(list(part.values())) for training, part in dense.items()}
    curves = []
    for (training, stage, criterion), by_sparsity in groups.items():
        points = {sparsity: _estimates(part) for sparsity, part in sorted(by_sparsity.items())}
        if training in whole and 0.0 not in points:
            points = {0.0: whole[training]} | points
        curves.append(Curve(training, stage, criterion, points))
    trainings = sorted({*dense, *(curve.training for curve in curves)}, key=_rank)
    criteria = in_order(c.criterion for c in curves)
    stages = in_order((c.stage for c in curves), STAGE_NAMES)
    curves.sort(key=lambda c: (stages.index(c.stage), criteria.index(c.criterion), trainings.index(c.training)))
    return Experiment(recipe, task, title, rows, curves, trainings, whole)


def training_of(row: Mapping[str, Any]) -> Training:
    """The training a row (or the configuration of a cell) belongs to."""
    return Training(*(str(row.get(key) or "") for key in ("method", "prior", "structure", "source")))


def number(value: Any) -> float | None:
    """A cell of a CSV file or data frame as a number; ``None`` where it is empty, not a number or not finite."""
    try:
        found = float(value)
    except (TypeError, ValueError):
        return None
    return found if math.isfinite(found) else None


def _estimates(rows: Sequence[Row]) -> dict[str, Estimate]:
    found = {}
    for key in MEASURED:
        values = [value for row in rows if (value := number(row.get(key))) is not None]
        if values:
            found[key] = Estimate.of(values)
    return found


def _unique(rows: Sequence[Row]) -> list[Row]:
    """Drop exact repeats; refuse two measurements of the same thing, as they are not two seeds."""
    seen: dict[tuple[str, ...], Row] = {}
    for row in rows:
        key = tuple(str(row.get(name) if row.get(name) is not None else "") for name in IDENTITY)
        first = seen.setdefault(key, row)
        if first is not row and any(number(first.get(m.key)) != number(row.get(m.key)) for m in METRICS):
            what = ", ".join(f"{name} {value}" for name, value in zip(IDENTITY, key, strict=True) if value)
            raise ValueError(f"two rows measure the same thing and differ ({what}); report these runs apart.")
    return list(seen.values())


def _title(network: str, data: str) -> str:
    return f"{NETWORK_NAMES.get(network, network)} on {DATA_NAMES.get(data, data)}"


def _rank(training: Training) -> tuple[Any, ...]:
    """MAP, L1, SpaM; then priors from coarse to fine, and the diagonal before KFAC."""

    def place(name: str, known: Iterable[str]) -> tuple[int, str]:
        order = list(known)
        return (order.index(name) if name in order else len(order), name)

    return (
        place(training.method, METHOD_NAMES),
        place(training.structure, STRUCTURE_NAMES),
        place(training.source, SOURCE_NAMES),
        place(training.prior, PRIOR_NAMES),
    )
