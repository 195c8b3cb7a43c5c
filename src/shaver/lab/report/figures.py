"""The paper's figures, as SVG and PNG: curves over sparsity, priors, stages, Pareto, training, costs."""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaver.lab.report import canvas
from shaver.lab.report.frame import QUANTITIES, Curve, Experiment, Variant, training_curves
from shaver.lab.report.names import CRITERION_NAMES, METRICS, STAGE_NAMES
from shaver.lab.report.times import scoring_times, training_times

if TYPE_CHECKING:
    from pandas import DataFrame

_METHOD_COLOURS = {"map": "#0072b2", "l1": "#009e73", "spam": "#d55e00", "vd": "#cc79a7", "l0": "#56b4e9"}
#: What a Pareto front is drawn over.
COSTS = {"flops": "FLOPs", "bytes": "bytes", "latency_ms": "latency, ms"}
Draw = Callable[[Any], None]


def write_figures(
    experiments: Sequence[Experiment], histories: "DataFrame", folder: Path, suffixes: Sequence[str]
) -> list[Path]:
    """Draw every figure that the results have the numbers for."""
    jobs: list[tuple[str, Draw]] = []
    if any(e.curves for e in experiments):
        jobs.append(("accuracy", partial(overview, experiments=experiments)))
    for e in experiments:
        if e.curves:
            jobs.append((f"{e.slug}-quality", partial(quality, experiment=e)))
        if len([t for t in e.variants if t.method == "spam"]) > 1 and e.curves:
            jobs.append((f"{e.slug}-priors", partial(priors, experiment=e)))
        if len(e.stages) > 1:
            jobs.append((f"{e.slug}-stages", partial(stages, experiment=e)))
        if varying_costs(e):
            jobs.append((f"{e.slug}-pareto", partial(pareto, experiment=e)))
        if any(curves := training_curves(e, histories)):
            jobs.append((f"{e.slug}-training", partial(training, curves=curves, title=e.title)))
    if training_times(experiments).bars or scoring_times(experiments).bars:
        jobs.append(("costs", partial(costs, experiments=experiments)))
    written = []
    with canvas.drawing() as plt:
        for name, draw in jobs:
            draw(plt)
            written += canvas.save_figure(plt, folder / name, suffixes)
    return written


def overview(plt: Any, experiments: Sequence[Experiment]) -> None:
    """Accuracy over sparsity by the main criterion, one panel per experiment, a line per method and one for its repair.

    Experiments with a single method are left out if others compare several.
    """
    shown = [e for e in experiments if len(main_curves(e)) > 1] or [e for e in experiments if e.curves]
    axes = canvas.panels(plt, len(shown))
    for axis, experiment in zip(axes, shown, strict=True):
        curves = main_curves(experiment)
        repaired = [c for c in _main_curves(experiment, "repaired") if c.criterion == experiment.main_criterion]
        for curve in (*curves, *repaired):
            method, label = curve.variant.method, curve.variant.method_name
            style = {"color": _METHOD_COLOURS.get(method, "#661100"), "linestyle": canvas.DASHES.get(method, "solid")}
            style |= {"label": label, "linewidth": 2.4}
            if curve in repaired:
                style |= {"label": f"{label}, repaired", "linewidth": 1.2, "marker": "o", "markersize": 4}
            canvas.draw_line(axis, curve.values("accuracy"), METRICS[0], band=curve not in repaired, **style)
        canvas.sparsity_axis(axis, curves)
        axis.set_title(experiment.title)
    for axis in axes:
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel(METRICS[0].title)
    canvas.axes_legend(plt, axes)


def quality(plt: Any, experiment: Experiment) -> None:
    """Accuracy, NLL, ECE and Brier score over sparsity."""
    curves = _main_curves(experiment, experiment.stages[0])
    metrics = [m for m in METRICS if any(c.values(m.key) for c in curves)]
    for axis, metric in zip(canvas.panels(plt, len(metrics), columns=2), metrics, strict=True):
        canvas.draw_curves(axis, curves, metric)
        axis.set_title(metric.title)
    canvas.curve_legend(plt, curves, experiment.title)


def priors(plt: Any, experiment: Experiment) -> None:
    """Priors (colour) and curvatures (dashes) of SpaM beside MAP, for OPD and GraSP or what there is."""
    names = [c for c in ("opd", "grasp") if c in experiment.criteria] or experiment.criteria[:1]
    spam = [t for t in experiment.variants if t.method == "spam"]
    prior_names = list(dict.fromkeys(t.prior_name for t in spam))
    curvatures = list(dict.fromkeys(t.curvature_name for t in spam))
    dashes = ["solid", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (2, 2)), (0, (8, 3))]

    def style(t: Variant) -> dict[str, Any]:
        if t.method != "spam":
            return {"color": "#777777", "linestyle": canvas.DASHES.get(t.method, "solid"), "label": t.method_name}
        dash = dashes[curvatures.index(t.curvature_name) % len(dashes)]
        colour = canvas.CYCLE[prior_names.index(t.prior_name) % len(canvas.CYCLE)]
        return {"color": colour, "linestyle": dash, "label": f"{t.prior_name}, {t.curvature_name}"}

    axes = canvas.panels(plt, len(names))
    for axis, name in zip(axes, names, strict=True):
        for curve in (c for c in experiment.curves if (c.criterion, c.stage) == (name, experiment.stages[0])):
            canvas.draw_line(
                axis, curve.values("accuracy"), METRICS[0], band=False, linewidth=1.8, **style(curve.variant)
            )
        canvas.sparsity_axis(axis, [c for c in experiment.curves if c.criterion == name])
        axis.set_title(f"{experiment.title}, {CRITERION_NAMES[name]}")
    axes[0].set_ylabel(METRICS[0].title)
    canvas.axes_legend(plt, axes)


def stages(plt: Any, experiment: Experiment) -> None:
    """Post hoc, fine-tuned, online and structured pruning side by side, on one scale."""
    names = experiment.stages
    axes = canvas.panels(plt, len(names), sharey=True)
    for axis, stage in zip(axes, names, strict=True):
        canvas.draw_curves(axis, _main_curves(experiment, stage), METRICS[0])
        axis.set_title(STAGE_NAMES[stage])
    axes[0].set_ylabel(METRICS[0].title)
    canvas.curve_legend(plt, [c for stage in names for c in _main_curves(experiment, stage)], experiment.title)


def pareto(plt: Any, experiment: Experiment) -> None:
    """Accuracy against cost; the stairs are the best that each cost can buy."""
    keys = varying_costs(experiment)
    axes = canvas.panels(plt, len(keys))
    for axis, key in zip(axes, keys, strict=True):
        points = []
        for curve in (c for c in experiment.curves if changes_cost(c, key)):
            cost, accuracy = curve.values(key), curve.values("accuracy")
            own = [(cost[s].mean, 100 * accuracy[s].mean) for s in cost if s in accuracy]
            points += own
            hollow = curve.stage == experiment.stages[0] and len(experiment.stages) > 1
            axis.scatter(
                *zip(*own, strict=True), s=22, color=canvas.colour_of(curve.criterion), linewidths=1.1,
                marker="o" if curve.variant.method == "spam" else "^",
                **({"facecolors": "none"} if hollow else {}), zorder=3,
            )  # fmt: skip
        axis.step(*zip(*front(points), strict=True), where="post", color="#333333", linewidth=1, zorder=2)
        axis.set_xscale("log")
        axis.set_xlabel(COSTS[key])
    axes[0].set_ylabel(METRICS[0].title)
    canvas.curve_legend(plt, experiment.curves, experiment.title, points=True)


def training(plt: Any, curves: Mapping[Variant, Mapping[str, Sequence[tuple[float, float]]]], title: str) -> None:
    """Loss, evidence, effective parameters and the share of weights with S > 1, mean over seeds, by epoch."""
    keys = [key for key in QUANTITIES if any(key in found for found in curves.values())]
    axes = canvas.panels(plt, len(keys), columns=2)
    for axis, key in zip(axes, keys, strict=True):
        for i, (variant, found) in enumerate(curves.items()):
            if key in found:
                colour = "#888888" if variant.method == "map" else canvas.CYCLE[i % len(canvas.CYCLE)]
                style = {"color": colour, "linestyle": canvas.DASHES.get(variant.method, "solid"), "linewidth": 1.8}
                axis.plot(*zip(*found[key], strict=True), label=variant.label(list(curves)), **style)
        axis.set_title(QUANTITIES[key])
        axis.set_xlabel("epoch")
    canvas.axes_legend(plt, axes, title)


def costs(plt: Any, experiments: Sequence[Experiment]) -> None:
    """Training time of each method, and the time of each criterion's scores."""
    found = [times for times in (training_times(experiments), scoring_times(experiments)) if times.bars]
    height = 1.1 + 0.27 * max(len(times.bars) for times in found)
    figure, axes = plt.subplots(1, len(found), figsize=(5.8 * len(found), height), squeeze=False)
    for axis, times in zip(axes[0], found, strict=True):
        bars = [(label, e, _METHOD_COLOURS.get(kind) or canvas.colour_of(kind)) for label, e, kind in times.bars]
        canvas.draw_bars(axis, bars, times.show, max(len(one.bars) for one in found))
        scale = " (logarithmic)" if axis.get_xscale() == "log" else ""
        axis.set_title(times.title + scale, wrap=True)
    figure.tight_layout()


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points ``(cost, quality)`` that no other matches at lower cost, by rising cost."""
    best, kept = -math.inf, []
    for cost, value in sorted(points, key=lambda p: (p[0], -p[1])):
        if value > best:
            kept.append((cost, value))
            best = value
    return kept


def varying_costs(experiment: Experiment) -> list[str]:
    """The costs that pruning changed; a mask, say, changes neither what is multiplied nor how long that takes."""
    return [key for key in COSTS if any(changes_cost(curve, key) for curve in experiment.curves)]


def changes_cost(curve: Curve, key: str) -> bool:
    """Whether a curve's networks differ in a cost, and have an accuracy to weigh it against."""
    values = {found.mean for found in curve.values(key).values()}
    return len(values) > 1 and min(values) > 0 and bool(curve.values("accuracy"))


def main_curves(experiment: Experiment) -> list[Curve]:
    """One curve per method: the first stage, the main criterion."""
    if not experiment.curves:
        return []
    return [c for c in _main_curves(experiment, experiment.stages[0]) if c.criterion == experiment.main_criterion]


def _main_curves(experiment: Experiment, stage: str) -> list[Curve]:
    main = experiment.main_variants()
    return [c for c in experiment.curves if c.stage == stage and c.variant in main]
