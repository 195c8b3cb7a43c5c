"""How figures are drawn: the house style, panels, lines over sparsity, bars and legends."""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from shaver.io import atomic_path
from shaver.lab.report.frame import Curve, Estimate
from shaver.lab.report.names import CRITERION_NAMES, METHOD_NAMES, Metric, in_order
from shaver.lab.report.tables import percent
from shaver.naming import require

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
DASHES: dict[str, Any] = {
    "map": (0, (4, 2)),
    "l1": (0, (1, 1.5)),
    "spam": "solid",
    "vd": (0, (6, 1)),
    "l0": (0, (3, 1, 1, 1)),
}
_TICKS = (0.0, 0.5, 0.75, 0.9, 0.95, 0.98, 0.99, 0.995, 0.998, 0.999)
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


def panels(plt: Any, count: int, columns: int = 3, *, sharey: bool = False) -> list[Any]:
    """A new figure with this many axes, in rows of at most ``columns``."""
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


def draw_curves(axis: Any, curves: Sequence[Curve], metric: Metric) -> None:
    """Colour is the criterion, dashes the method; the error of OPD as a band, as more bands would hide the curves."""
    for curve in curves:
        strong = curve.criterion == "opd"
        draw_line(axis, curve.values(metric.key), metric, color=colour_of(curve.criterion),
              linestyle=DASHES.get(curve.variant.method, "solid"), linewidth=2.4 if strong else 1.3,
              zorder=3 if strong else 2, band=strong or len(curves) <= 4)  # fmt: skip
    sparsity_axis(axis, curves)


def draw_line(axis: Any, values: Mapping[float, Estimate], metric: Metric, *, band: bool, **style: Any) -> None:
    """A metric over sparsity, with its standard error as a band."""
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


def sparsity_axis(axis: Any, curves: Sequence[Curve]) -> None:
    """Ticks and label of the axis of sparsities, as far as the curves go."""
    top = max((s for c in curves for s in c.points), default=0.0)
    ticks = [s for s in _TICKS if s <= top + 1e-9] or [0.0]
    axis.set_xticks([place(s) for s in ticks], [percent(s) for s in ticks])
    axis.set_xlabel("share of weights removed, %", fontsize=9)
    axis.margins(x=0.02)


def colour_of(criterion: str) -> str:
    """The colour of a criterion, also of one that a user has added."""
    return COLOURS.get(criterion, "#661100")


def draw_bars(axis: Any, bars: Sequence[tuple[str, Estimate, str]], show: Callable[[float], str], lines: int) -> None:
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


def curve_legend(plt: Any, curves: Sequence[Curve], title: str = "", *, points: bool = False) -> None:
    """A legend of methods and criteria, for lines or for points."""
    from matplotlib.lines import Line2D

    handles = []
    for method in in_order((c.variant.method for c in curves), METHOD_NAMES):
        look = (
            {"linestyle": "none", "marker": "o" if method == "spam" else "^"}
            if points
            else {"linestyle": DASHES.get(method, "solid"), "linewidth": 2}
        )
        handles.append(Line2D([], [], color="#333333", label=METHOD_NAMES[method], **look))
    for criterion in in_order(c.criterion for c in curves):
        look = {"linestyle": "none", "marker": "s"} if points else {"linewidth": 2.4 if criterion == "opd" else 1.6}
        handles.append(Line2D([], [], color=colour_of(criterion), label=CRITERION_NAMES[criterion], **look))
    _below(plt, handles, [str(handle.get_label()) for handle in handles], title)


def axes_legend(plt: Any, axes: Sequence[Any], title: str = "") -> None:
    """One legend of everything that is labelled in the axes."""
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
