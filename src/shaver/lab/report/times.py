"""Times of training and scoring: per network, or relative to a baseline if there are many."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shaver.lab.report.frame import Estimate, Experiment, Variant
from shaver.lab.report.names import CRITERION_NAMES, in_order

#: Maximum number of bars. Beyond it there is one bar per kind of training or criterion, averaged over experiments.
_MOST = 24


@dataclass(frozen=True)
class Times:
    """Bars to draw: label, time or ratio, and the method or criterion that gives the colour."""

    title: str
    bars: Sequence[tuple[str, Estimate, str]]
    show: Callable[[float], str]


def training_times(experiments: Sequence[Experiment]) -> Times:
    """Each training of each experiment; with many, relative to MAP by method and curvature."""
    timed = [(e, t, found) for e in experiments for t in e.variants
             if (found := numbers_of(e, t).get("train_seconds"))]  # fmt: skip
    if len(timed) <= _MOST:
        bars = [(f"{e.title}, {t.label(e.variants)}", found, t.method) for e, t, found in timed]
        return Times("Training", bars, duration)
    ratios: dict[tuple[str, str], list[float]] = {}
    for experiment, variant, _ in timed:
        if (ratio := time_over_map(experiment, variant)) is not None:
            label = " ".join(filter(None, (variant.method_name, variant.curvature_name)))
            ratios.setdefault((label, variant.method), []).append(ratio)
    means = [(label, Estimate.of(values), method) for (label, method), values in ratios.items()]
    return Times("Training, relative to MAP, mean over experiments", means, "{:.2f}".format)


def scoring_times(experiments: Sequence[Experiment]) -> Times:
    """Each criterion in each experiment; with many, relative to the fastest of the experiment."""
    found = [(e, {c: s for c in e.criteria if (s := scoring_seconds(e, c))}) for e in experiments]
    if sum(len(times) for _, times in found) <= _MOST:
        bars = [(f"{e.title}, {CRITERION_NAMES[c]}", s, c) for e, times in found for c, s in times.items()]
        return Times("Scoring a network once", bars, duration)
    criteria = in_order(c for _, times in found for c in times)
    ratios = {
        c: [times[c].mean / min(t.mean for t in times.values()) for _, times in found if c in times] for c in criteria
    }
    means = [(CRITERION_NAMES[c], Estimate.of(values), c) for c, values in ratios.items()]
    return Times("Scoring a network, relative to the fastest criterion, mean over experiments", means, "{:.3g}".format)


def time_over_map(experiment: Experiment, variant: Variant) -> float | None:
    """The time of a training, divided by that of MAP on the same data."""
    base = experiment.main_variant("map")
    of_map = None if base is None else numbers_of(experiment, base).get("train_seconds")
    own = numbers_of(experiment, variant).get("train_seconds")
    return None if own is None or of_map is None else own.mean / of_map.mean


def numbers_of(experiment: Experiment, variant: Variant) -> dict[str, Estimate]:
    """What a training reached and took; the quality only if the dense network was measured."""
    if variant in experiment.dense:
        return dict(experiment.dense[variant])
    pruned = next((next(iter(c.points.values())) for c in experiment.curves if c.variant == variant), {})
    return {key: pruned[key] for key in ("train_seconds", "epochs", "log_evidence") if key in pruned}


def scoring_seconds(experiment: Experiment, criterion: str) -> Estimate | None:
    """The time of a criterion's scores, over every network of the experiment; a network's sparsities share one."""
    curves = [c for c in experiment.curves if c.criterion == criterion and c.stage == experiment.stages[0]]
    values = [next(iter(found.values())).mean for c in curves if (found := c.values("score_seconds"))]
    values = [value for value in values if value > 0]  # online pruning scores while it trains
    return Estimate.of(values) if values else None


def duration(seconds: float) -> str:
    """Three digits and a unit people can compare: “13.1 s”, “293 ms”, “645 µs”."""
    factor, unit = (1, "s") if seconds >= 1 else (1e3, "ms") if seconds >= 1e-3 else (1e6, "µs")
    value = seconds * factor
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
