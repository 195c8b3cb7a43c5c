"""The results and training curves of runs: one data frame, its means over seeds, and the experiments in it."""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaver.io import read_json
from shaver.lab.report.names import (
    METHOD_NAMES,
    METRICS,
    PRIOR_NAMES,
    SOURCE_NAMES,
    STAGE_NAMES,
    STRUCTURE_NAMES,
    in_order,
)
from shaver.lab.run.results import CELLS, CONFIG, DENSE, read_study, read_table

if TYPE_CHECKING:
    from pandas import DataFrame

#: What tells variants of training apart.
_VARIANT = ["method", "prior", "structure", "source"]
#: What a row is, apart from its numbers: no two rows of a report share all of these.
_IDENTITY = ["recipe", "task", "scale", "network", "data", *_VARIANT, "seed", "stage", "criterion", "sparsity"]
#: Every column that is averaged over seeds.
_MEASURED = [
    *(metric.key for metric in METRICS), "achieved", "log_evidence", "nonzeros", "parameters", "bytes", "flops",
    "latency_ms", "train_seconds", "score_seconds", "epochs",
]  # fmt: skip
#: The columns of training curves that are shown, and what they are.
QUANTITIES = {
    "loss": "training loss",
    "log_evidence": "log evidence",
    "effective_parameters": "effective parameters",
    "relevant": "share of weights with S > 1",
}


@dataclass(frozen=True)
class Estimate:
    """A mean over seeds; the standard error of the mean is ``None`` for a single seed."""

    mean: float
    error: float | None
    count: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Estimate":
        """The mean of some numbers, and its standard error: the sample standard deviation divided by √n."""
        import pandas

        found = pandas.Series(values, dtype=float)
        return cls(float(found.mean()), float(found.sem()) if len(found) > 1 else None, len(found))


@dataclass(frozen=True)
class Variant:
    """How networks were trained: the method and, where there was a choice, the prior and the curvature."""

    method: str
    prior: str = ""
    structure: str = ""
    source: str = ""

    @property
    def method_name(self) -> str:
        """MAP, L1 or SpaM; anything else as it is."""
        return METHOD_NAMES[self.method]

    @property
    def prior_name(self) -> str:
        """The paper's word for the prior."""
        return PRIOR_NAMES[self.prior]

    @property
    def curvature_name(self) -> str:
        """Structure and source, such as “KFAC GGN”."""
        names = (STRUCTURE_NAMES[self.structure], SOURCE_NAMES[self.source])
        return " ".join(name for name in names if name)

    def label(self, among: Sequence["Variant"]) -> str:
        """The method; with prior and curvature where the method has several variants."""
        several = len([variant for variant in among if variant.method == self.method]) > 1
        parts = (self.method_name, self.prior_name, self.curvature_name) if several else (self.method_name,)
        return ", ".join(part for part in parts if part)

    @property
    def rank(self) -> tuple[Any, ...]:
        """MAP, L1, SpaM; then priors from coarse to fine, and the diagonal before KFAC."""
        orders = (METHOD_NAMES, STRUCTURE_NAMES, SOURCE_NAMES, PRIOR_NAMES)
        own = (self.method, self.structure, self.source, self.prior)
        return tuple((list(o).index(n) if n in o else len(o), n) for o, n in zip(orders, own, strict=True))


@dataclass(frozen=True)
class Curve:
    """One line of a figure: how it was trained, when and by what it was pruned, and its numbers at each sparsity."""

    variant: Variant
    stage: str
    criterion: str
    points: Mapping[float, Mapping[str, Estimate]]

    def values(self, key: str) -> dict[float, Estimate]:
        """One column over the sparsities that have it."""
        return {s: found[key] for s, found in self.points.items() if key in found}


@dataclass(frozen=True)
class Failure:
    """The networks of a variant that did not learn: they are no better than guessing before they are pruned."""

    accuracies: Mapping[int, float]
    networks: int

    @property
    def is_total(self) -> bool:
        """Whether no network of the variant learned; only then do means show them."""
        return len(self.accuracies) == self.networks

    def __str__(self) -> str:
        return f"{len(self.accuracies)} of {self.networks} did not learn"


@dataclass(frozen=True)
class Experiment:
    """One task (a network on its data) under one recipe, with everything measured for it."""

    recipe: str  # the recipe's name
    task: str  # the task's name
    title: str
    frame: "DataFrame" = field(repr=False, compare=False)
    # Variants of which some networks did not learn. Those networks are in no mean, unless none learned.
    failures: Mapping[Variant, Failure] = field(repr=False)
    dense: Mapping[Variant, Mapping[str, Estimate]] = field(repr=False)
    # One for each stage, criterion and variant, in this order; each begins at the dense network.
    curves: Sequence[Curve] = field(repr=False)

    @cached_property
    def variants(self) -> Sequence[Variant]:
        """All variants of training."""
        return sorted({*self.dense, *(curve.variant for curve in self.curves)}, key=lambda variant: variant.rank)

    @property
    def slug(self) -> str:
        """For file names and anchors."""
        return re.sub(r"[^a-z0-9]+", "-", self.title.lower()).strip("-")

    @property
    def networks(self) -> int:
        """The number of trained networks."""
        return len(self.frame.drop_duplicates([*_VARIANT, "seed"]))

    @property
    def stages(self) -> list[str]:
        """The stages with curves, in order."""
        return in_order((curve.stage for curve in self.curves), STAGE_NAMES)

    @property
    def criteria(self) -> list[str]:
        """The criteria with curves, in order."""
        return in_order(curve.criterion for curve in self.curves)

    @property
    def main_criterion(self) -> str:
        """OPD, or the first there is."""
        return "opd" if "opd" in self.criteria else next(iter(self.criteria), "")

    def main_variant(self, method: str) -> Variant | None:
        """The variant that stands for its method: parameter-wise and diagonal where there is a choice."""
        found = [variant for variant in self.variants if variant.method == method]
        return min(found, key=lambda v: (v.prior != "parameter", v.structure != "diag"), default=None)

    def main_variants(self) -> list[Variant]:
        """One variant per method."""
        methods = dict.fromkeys(variant.method for variant in self.variants)
        return [variant for method in methods if (variant := self.main_variant(method)) is not None]


def load_runs(*folders: str | Path) -> "DataFrame":
    """The results of one or more run folders as one data frame.

    Example:
        >>> frame = load_runs("runs/lenet-mnist-cpu", "runs/fcn-mnist-cpu")
        >>> frame.query("criterion == 'opd'").groupby(["method", "sparsity"]).accuracy.mean()

    Args:
        folders: Folders of ``shaver run``. A row that several of them share (recipes share networks) appears once
            for each, under that recipe's name.

    Returns:
        The columns :data:`~shaver.lab.run.results.COLUMNS`; missing numbers are NaN, missing names empty.

    Raises:
        FileNotFoundError: A folder is missing, or not the folder of a study.
        ValueError: A file in it is damaged, or there are no results yet.
        ImportError: Pandas is missing.
    """
    if not folders:
        raise ValueError("load_runs needs at least one folder, such as runs/lenet-mnist-cpu.")
    frames = []
    for folder in map(Path, folders):
        read_study(folder)
        frames.append(read_table(folder))
    import pandas

    return pandas.concat(frames, ignore_index=True)


def load_histories(folder: Path, recipe: str, cells: Sequence[str]) -> "DataFrame":
    """The training curves of a run: one row per network and epoch.

    Cells that have none yet are left out, and so are networks that were pruned while they trained: each has a curve
    of its own for each sparsity. ``cells`` are those of the study as it is now; the folder may hold others.
    """
    import pandas

    found: dict[tuple[str, ...], DataFrame] = {}
    for place in (folder / CELLS / cell for cell in sorted(cells)):
        if not (place / "history.csv").is_file() or not (place / CONFIG).is_file():
            continue
        settings = read_json(place / CONFIG)
        training = settings.get("training") or {}
        if not training.get("labels") or training.get("online") is not None:
            continue
        labels = {name: training["labels"].get(name) or "" for name in _VARIANT}
        labels |= {"recipe": recipe, "task": settings["task"], "seed": training["labels"].get("seed", 0)}
        found[tuple(map(str, labels.values()))] = pandas.read_csv(place / "history.csv").assign(**labels)
    return pandas.concat(found.values(), ignore_index=True) if found else pandas.DataFrame()


def training_curves(
    experiment: Experiment, histories: "DataFrame"
) -> dict[Variant, dict[str, list[tuple[float, float]]]]:
    """Variant → quantity → ``(epoch, mean over seeds)``, at the epochs that every seed reached."""
    if histories.empty:
        return {}
    own = histories[(histories.recipe == experiment.recipe) & (histories.task == experiment.task)]
    curves: dict[Variant, dict[str, list[tuple[float, float]]]] = {}
    for labels, part in own.groupby(_VARIANT, sort=False):
        seeds = part.seed.nunique()
        columns = {}
        for key in (key for key in QUANTITIES if key in part):
            by_epoch = part.groupby("epoch")[key].agg(["mean", "count"])
            means = by_epoch[by_epoch["count"] == seeds]["mean"]
            if len(means):
                columns[key] = [(float(epoch), float(value)) for epoch, value in means.items()]
        curves[Variant(*labels)] = columns
    return {variant: curves[variant] for variant in sorted(curves, key=lambda v: v.rank)}


def experiments(frame: "DataFrame", titles: Mapping[tuple[str, str], str] | None = None) -> list[Experiment]:
    """Sort rows of results into experiments; a title names the recipe only where two would be the same.

    ``titles`` are those of the tasks, by recipe and task; a task without one is called by its name.
    """
    frame = _unique(_complete(frame))
    groups = dict(list(frame.groupby(["recipe", "task"], sort=False)))
    named = {key: (titles or {}).get(key) or key[1] for key in groups}
    return [
        _experiment(key, f"{title} ({key[0]})" if list(named.values()).count(title) > 1 else title, groups[key])
        for key, title in named.items()
    ]


def _complete(frame: "DataFrame") -> "DataFrame":
    """The frame with every column that is needed; what is not finite is missing."""
    import pandas

    frame = frame.reindex(columns=list(dict.fromkeys([*_IDENTITY, *_MEASURED, "learned", *frame.columns])))
    text = [name for name in (*_IDENTITY, "learned") if name not in ("seed", "sparsity")]
    frame[text] = frame[text].astype(object).fillna("")
    frame["task"] = frame.task.where(frame.task != "", frame.network + "-" + frame.data)
    numbers = frame[_MEASURED].apply(pandas.to_numeric, errors="coerce")
    frame[_MEASURED] = numbers.where(numbers.abs() < math.inf)
    return frame


def _unique(frame: "DataFrame") -> "DataFrame":
    """Drop exact repeats; refuse two measurements of the same thing, as they are not two seeds."""
    frame = frame.drop_duplicates([*_IDENTITY, *(metric.key for metric in METRICS)])
    twice = frame[frame.duplicated(_IDENTITY)]
    if len(twice):
        what = ", ".join(f"{name} {twice[name].iloc[0]}" for name in _IDENTITY if twice[name].iloc[0] != "")
        raise ValueError(f"two rows measure the same thing and differ ({what}); report these runs separately.")
    return frame


def _experiment(key: tuple[str, str], title: str, rows: "DataFrame") -> Experiment:
    failures = {}
    for labels, part in rows.groupby(_VARIANT, sort=False):
        networks = part.drop_duplicates("seed").sort_values("seed")  # the dense network's row comes first
        failed = networks[networks.learned == "no"]
        if len(failed):
            accuracies = dict(zip(failed.seed.tolist(), failed.accuracy.tolist(), strict=True))
            failures[Variant(*labels)] = Failure(accuracies, len(networks))
    one_learned = rows.groupby(_VARIANT).learned.transform(lambda learned: (learned != "no").any())
    shown = rows[(rows.learned != "no") | ~one_learned]
    # A network may have been measured before each way to prune it.
    dense = shown[shown.criterion == DENSE].drop_duplicates([*_VARIANT, "seed"])
    whole = {Variant(*labels): found for labels, found in _means(dense, _VARIANT).items()}
    points: dict[tuple[Variant, str, str], dict[float, Mapping[str, Estimate]]] = {}
    for labels, found in _means(shown[shown.criterion != DENSE], [*_VARIANT, "stage", "criterion", "sparsity"]).items():
        variant, (stage, criterion, sparsity) = Variant(*labels[:4]), labels[4:]
        begun = {0.0: whole[variant]} if variant in whole and sparsity > 0 else {}
        points.setdefault((variant, stage, criterion), dict(begun))[float(sparsity)] = found
    criteria = in_order(criterion for _, _, criterion in points)
    stages = in_order((stage for _, stage, _ in points), STAGE_NAMES)
    curves = [Curve(*labels, found) for labels, found in points.items()]
    curves.sort(key=lambda c: (stages.index(c.stage), criteria.index(c.criterion), c.variant.rank))
    return Experiment(*key, title, rows, failures, whole, curves)


def _means(rows: "DataFrame", keys: list[str]) -> dict[tuple[Any, ...], dict[str, Estimate]]:
    """Labels of a group → its means over seeds, where there are numbers."""
    table = rows.groupby(keys)[_MEASURED].agg(["mean", "sem", "count"])
    found = {}
    for labels, numbers in zip(table.index, table.to_numpy(), strict=True):
        triples = numbers.reshape(-1, 3)
        found[labels] = {
            key: Estimate(float(mean), None if math.isnan(error) else float(error), int(count))
            for key, (mean, error, count) in zip(_MEASURED, triples, strict=True)
            if count
        }
    return found
