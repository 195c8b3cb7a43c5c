"""The paper's figures, as SVG and PNG: curves over sparsity, priors, stages, Pareto, training, costs."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from shaver.io import atomic_path
from shaver.lab.report.frame import QUANTITIES, Curve, Estimate, Experiment, Variant, training_curves
from shaver.lab.report.names import CRITERION_NAMES, METHOD_NAMES, METRICS, STAGE_NAMES, Metric, in_order
from shaver.lab.report.tables import percent
from shaver.lab.report.times import scoring_times, training_times
from shaver.naming import require

if TYPE_CHECKING:
    from pandas import DataFrame

#: By criterion, after Okabe and Ito: told apart with any colour vision. The page uses the same.
COLOURS = {
    "opd": "#d55e00",
    "obd": "#332288",
    "magnitude": "#0072b2",
    "snip": "#e69f00",
    "grasp": "#cc79a7",
    "synflow": "#009e73",
    "wanda": "#56b4e9",
    "random": "#999999",
}
#: For anything else that is told apart by colour.
CYCLE = ("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#332288", "#56b4e9", "#999999", "#661100")
_DASHES: dict[str, Any] = {
    "map": (0, (4, 2)),
    "l1": (0, (1, 1.5)),
    "spam": "solid",
    "vd": (0, (6, 1)),
    "l0": (0, (3, 1, 1, 1)),
}
_METHOD_COLOURS = {"map": "#0072b2", "l1": "#009e73", "spam": "#d55e00", "vd": "#cc79a7", "l0": "#56b4e9"}
_TICKS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
#: What a Pareto front is drawn over.
COSTS = {"flops": "FLOPs", "bytes": "bytes", "latency_ms": "latency, ms"}
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e9e9e9",
    "grid.linewidth": 0.8,
    "axes.edgecolor": "#888888",
    "axes.axisbelow": True,
    "axes.titlelocation": "left",
    "axes.titleweight": "bold",
    "axes.titlesize": 10,
    "xtick.color": "#444444",
    "ytick.color": "#444444",
    "svg.fonttype": "path",  # looks the same wherever it is shown
    "svg.hashsalt": "shaver",  # the same numbers give the same file
}

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
    with drawing() as plt:
        for name, draw in jobs:
            draw(plt)
            written += save_figure(plt, folder / name, suffixes)
    return written


def overview(plt: Any, experiments: Sequence[Experiment]) -> None:
    """Accuracy over sparsity by the main criterion, one panel per experiment and one line per method.

    Experiments with a single method are left out if others compare several.
    """
    shown = [e for e in experiments if len(main_curves(e)) > 1] or [e for e in experiments if e.curves]
    axes = _panels(plt, len(shown))
    for axis, experiment in zip(axes, shown, strict=True):
        curves = main_curves(experiment)
        for curve in curves:
            method = curve.variant.method
            _line(axis, curve.values("accuracy"), METRICS[0], band=True, color=_METHOD_COLOURS.get(method, "#661100"),
                  linestyle=_DASHES.get(method, "solid"), linewidth=2.4, label=curve.variant.method_name)  # fmt: skip
        _sparsity_axis(axis, curves)
        axis.set_title(experiment.title)
    for axis in axes:
        if axis.get_subplotspec().is_first_col():
            axis.set_ylabel(METRICS[0].title)
    _legend_of(plt, axes)


def quality(plt: Any, experiment: Experiment) -> None:
    """Accuracy, NLL, ECE and Brier score over sparsity."""
    curves = _main_curves(experiment, experiment.stages[0])
    metrics = [m for m in METRICS if any(c.values(m.key) for c in curves)]
    for axis, metric in zip(_panels(plt, len(metrics), columns=2), metrics, strict=True):
        _over_sparsity(axis, curves, metric)
        axis.set_title(metric.title)
    _legend(plt, curves, experiment.title)


def priors(plt: Any, experiment: Experiment) -> None:
    """Priors (colour) and curvatures (dashes) of SpaM beside MAP, for OPD and GraSP or what there is."""
    names = [c for c in ("opd", "grasp") if c in experiment.criteria] or experiment.criteria[:1]
    spam = [t for t in experiment.variants if t.method == "spam"]
    prior_names = list(dict.fromkeys(t.prior_name for t in spam))
    curvatures = list(dict.fromkeys(t.curvature_name for t in spam))
    dashes = ["solid", (0, (4, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (2, 2)), (0, (8, 3))]

    def style(t: Variant) -> dict[str, Any]:
        if t.method != "spam":
            return {"color": "#777777", "linestyle": _DASHES.get(t.method, "solid"), "label": t.method_name}
        dash = dashes[curvatures.index(t.curvature_name) % len(dashes)]
        colour = CYCLE[prior_names.index(t.prior_name) % len(CYCLE)]
        return {"color": colour, "linestyle": dash, "label": f"{t.prior_name}, {t.curvature_name}"}

    axes = _panels(plt, len(names))
    for axis, name in zip(axes, names, strict=True):
        for curve in (c for c in experiment.curves if (c.criterion, c.stage) == (name, experiment.stages[0])):
            _line(axis, curve.values("accuracy"), METRICS[0], band=False, linewidth=1.8, **style(curve.variant))
        _sparsity_axis(axis, [c for c in experiment.curves if c.criterion == name])
        axis.set_title(f"{experiment.title}, {CRITERION_NAMES[name]}")
    axes[0].set_ylabel(METRICS[0].title)
    _legend_of(plt, axes)


def stages(plt: Any, experiment: Experiment) -> None:
    """Post hoc, fine-tuned, online and structured pruning side by side, on one scale."""
    names = experiment.stages
    axes = _panels(plt, len(names), sharey=True)
    for axis, stage in zip(axes, names, strict=True):
        _over_sparsity(axis, _main_curves(experiment, stage), METRICS[0])
        axis.set_title(STAGE_NAMES[stage])
    axes[0].set_ylabel(METRICS[0].title)
    _legend(plt, [c for stage in names for c in _main_curves(experiment, stage)], experiment.title)


def pareto(plt: Any, experiment: Experiment) -> None:
    """Accuracy against cost; the stairs are the best that each cost can buy."""
    keys = varying_costs(experiment)
    axes = _panels(plt, len(keys))
    for axis, key in zip(axes, keys, strict=True):
        points = []
        for curve in (c for c in experiment.curves if changes_cost(c, key)):
            cost, accuracy = curve.values(key), curve.values("accuracy")
            own = [(cost[s].mean, 100 * accuracy[s].mean) for s in cost if s in accuracy]
            points += own
            hollow = curve.stage == experiment.stages[0] and len(experiment.stages) > 1
            axis.scatter(
                *zip(*own, strict=True), s=22, color=_colour(curve.criterion), linewidths=1.1,
                marker="o" if curve.variant.method == "spam" else "^",
                **({"facecolors": "none"} if hollow else {}), zorder=3,
            )  # fmt: skip
        axis.step(*zip(*front(points), strict=True), where="post", color="#333333", linewidth=1, zorder=2)
        axis.set_xscale("log")
        axis.set_xlabel(COSTS[key])
    axes[0].set_ylabel(METRICS[0].title)
    _legend(plt, experiment.curves, experiment.title, points=True)


def training(plt: Any, curves: Mapping[Variant, Mapping[str, Sequence[tuple[float, float]]]], title: str) -> None:
    """Loss, evidence, effective parameters and the share of weights with S > 1, mean over seeds, by epoch."""
    keys = [key for key in QUANTITIES if any(key in found for found in curves.values())]
    axes = _panels(plt, len(keys), columns=2)
    for axis, key in zip(axes, keys, strict=True):
        for i, (variant, found) in enumerate(curves.items()):
            if key in found:
                colour = "#888888" if variant.method == "map" else CYCLE[i % len(CYCLE)]
                style = {"color": colour, "linestyle": _DASHES.get(variant.method, "solid"), "linewidth": 1.8}
                axis.plot(*zip(*found[key], strict=True), label=variant.label(list(curves)), **style)
        axis.set_title(QUANTITIES[key])
        axis.set_xlabel("epoch")
    _legend_of(plt, axes, title)


def costs(plt: Any, experiments: Sequence[Experiment]) -> None:
    """Training time of each method, and the time of each criterion's scores."""
    found = [times for times in (training_times(experiments), scoring_times(experiments)) if times.bars]
    height = 1.1 + 0.27 * max(len(times.bars) for times in found)
    figure, axes = plt.subplots(1, len(found), figsize=(5.8 * len(found), height), squeeze=False)
    for axis, times in zip(axes[0], found, strict=True):
        bars = [(label, e, _METHOD_COLOURS.get(kind) or _colour(kind)) for label, e, kind in times.bars]
        _bars(axis, bars, times.show, max(len(one.bars) for one in found))
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


@contextmanager
def drawing() -> Iterator[Any]:
    """Matplotlib's pyplot in the house style, without a window."""
    matplotlib = require("matplotlib", "drawing figures", "report")
    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    with matplotlib.rc_context(_STYLE):
        yield plt


def save_figure(plt: Any, path: Path, suffixes: Sequence[str]) -> list[Path]:
    """Write the present figure as ``path.svg`` and so on, atomically, and close it."""
    options: dict[str, dict[str, Any]] = {"svg": {"metadata": {"Date": None}}, "png": {"dpi": 160}}
    written = []
    for suffix in suffixes:
        target = path.with_name(f"{path.name}.{suffix}")
        with atomic_path(target) as temporary:
            plt.gcf().savefig(temporary, format=suffix, **options[suffix])
        written.append(target)
    plt.close(plt.gcf())
    return written


def _panels(plt: Any, count: int, columns: int = 3, *, sharey: bool = False) -> list[Any]:
    columns = 2 if count == 4 else min(columns, count)  # four stand better in a square
    rows = -(-count // columns)
    figure, axes = plt.subplots(
        rows,
        columns,
        figsize=(4.4 * columns + (1.6 if columns == 1 else 0), 3.3 * rows + 0.6),
        squeeze=False,
        sharey=sharey,
    )
    flat = list(axes.flat)
    for axis in flat[count:]:
        figure.delaxes(axis)
    return flat[:count]


def main_curves(experiment: Experiment) -> list[Curve]:
    """One curve per method: the first stage, the main criterion."""
    if not experiment.curves:
        return []
    return [c for c in _main_curves(experiment, experiment.stages[0]) if c.criterion == experiment.main_criterion]


def _main_curves(experiment: Experiment, stage: str) -> list[Curve]:
    main = experiment.main_variants()
    return [c for c in experiment.curves if c.stage == stage and c.variant in main]


def _over_sparsity(axis: Any, curves: Sequence[Curve], metric: Metric) -> None:
    """Colour is the criterion, dashes the method; the error of OPD as a band, as more bands would hide the curves."""
    for curve in curves:
        strong = curve.criterion == "opd"
        _line(axis, curve.values(metric.key), metric, color=_colour(curve.criterion),
              linestyle=_DASHES.get(curve.variant.method, "solid"), linewidth=2.4 if strong else 1.3,
              zorder=3 if strong else 2, band=strong or len(curves) <= 4)  # fmt: skip
    _sparsity_axis(axis, curves)


def _line(axis: Any, values: Mapping[float, Estimate], metric: Metric, *, band: bool, **style: Any) -> None:
    places = [place(s) for s in values]
    means = [metric.factor * e.mean for e in values.values()]
    axis.plot(places, means, **style)
    if band and any(e.error for e in values.values()):
        errors = [metric.factor * (e.error or 0.0) for e in values.values()]
        low, high = ([m + sign * e for m, e in zip(means, errors, strict=True)] for sign in (-1, 1))
        axis.fill_between(places, low, high, color=style["color"], alpha=0.22, linewidth=0)


def place(sparsity: float) -> float:
    """The position of a sparsity on the axis: logarithmic in the share that is kept, to show the end in detail."""
    return -math.log10(max(1.0 - sparsity, 1e-4))


def _sparsity_axis(axis: Any, curves: Sequence[Curve]) -> None:
    top = max((s for c in curves for s in c.points), default=0.0)
    ticks = [s for s in _TICKS if s <= top + 1e-9] or [0.0]
    axis.set_xticks([place(s) for s in ticks], [percent(s) for s in ticks])
    axis.set_xlabel("share of weights removed, %", fontsize=9)
    axis.margins(x=0.02)


def _colour(criterion: str) -> str:
    return COLOURS.get(criterion, "#661100")


def _bars(axis: Any, bars: Sequence[tuple[str, Estimate, str]], show: Callable[[float], str], lines: int) -> None:
    """Horizontal bars, each with its number instead of an axis."""
    for i, (_, found, colour) in enumerate(bars):
        axis.barh(i, found.mean, color=colour, height=0.62)
        axis.annotate(
            show(found.mean), (found.mean, i), xytext=(4, 0), textcoords="offset points", va="center", fontsize=8
        )
    axis.set_yticks(range(len(bars)), [label for label, _, _ in bars], fontsize=8)
    means = [found.mean for _, found, _ in bars]
    if max(means) > 30 * min(means):
        axis.set_xscale("log")
    axis.margins(x=0.14)
    axis.xaxis.set_visible(False)
    axis.spines["bottom"].set_visible(False)
    axis.set_ylim(lines - 0.5, -0.5)  # bars of one thickness on both sides
    axis.grid(visible=False)


def _legend(plt: Any, curves: Sequence[Curve], title: str = "", *, points: bool = False) -> None:
    from matplotlib.lines import Line2D

    handles = []
    for method in in_order((c.variant.method for c in curves), METHOD_NAMES):
        look = (
            {"linestyle": "none", "marker": "o" if method == "spam" else "^"}
            if points
            else {"linestyle": _DASHES.get(method, "solid"), "linewidth": 2}
        )
        handles.append(Line2D([], [], color="#333333", label=METHOD_NAMES[method], **look))
    for criterion in in_order(c.criterion for c in curves):
        look = {"linestyle": "none", "marker": "s"} if points else {"linewidth": 2.4 if criterion == "opd" else 1.6}
        handles.append(Line2D([], [], color=_colour(criterion), label=CRITERION_NAMES[criterion], **look))
    _below(plt, handles, [str(handle.get_label()) for handle in handles], title)


def _legend_of(plt: Any, axes: Sequence[Any], title: str = "") -> None:
    handles = {label: handle for axis in axes for handle, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    _below(plt, list(handles.values()), list(handles), title)


def _below(plt: Any, handles: Sequence[Any], labels: Sequence[str], title: str = "") -> None:
    """A legend under the panels, as many lines as it needs."""
    figure = plt.gcf()
    width, height = figure.get_size_inches()
    longest = max(map(len, labels), default=1)
    columns = max(1, min(len(labels), int(width / (0.55 + 0.078 * longest))))
    lines = -(-len(labels) // columns)
    if title:
        figure.suptitle(title, x=0.012, ha="left", fontweight="bold", fontsize=11)
    figure.legend(handles, labels, loc="lower center", ncols=columns, frameon=False, handlelength=1.9, fontsize=9,
                  columnspacing=1.2, handletextpad=0.5)  # fmt: skip
    figure.tight_layout(rect=(0, (0.1 + 0.19 * lines) / height, 1, 1))
