"""Figures: accuracy over sparsity, MAP dashed beside SpaM solid, one panel a data set."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from shaver.io import atomic_path
from shaver.study.sweep import DENSE, Row
from shaver.study.tables import CRITERION_NAMES, METHOD_NAMES, in_order, mean_over_seeds

_COLOURS = {
    "opd": "#c1272d",
    "magnitude": "#1f5fa8",
    "snip": "#d98a00",
    "grasp": "#7b4fa3",
    "synflow": "#2e8b57",
    "wanda": "#8c564b",
    "obd": "#e377a2",
    "random": "#8a8a8a",
}
_DASHES: dict[str, Any] = {"map": (0, (4, 2)), "l1": (0, (1, 1.5)), "spam": "solid"}
_STYLE: dict[Any, Any] = {
    "font.family": "sans-serif",
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e6e6e6",
    "grid.linewidth": 0.8,
    "axes.axisbelow": True,
    "svg.fonttype": "path",  # looks the same wherever it is shown
    "svg.hashsalt": "shaver",  # the same numbers give the same file
}


def accuracy_figure(rows: Sequence[Row], titles: Mapping[str, str], path: Path) -> None:
    """Draw ``path.svg`` and ``path.png``.

    Sparsities are spaced evenly, because what matters happens between 80 and 99 %.

    Raises:
        ImportError: Matplotlib is missing.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError('figures need matplotlib: pip install "shaver[report]".') from error
    matplotlib.use("Agg", force=False)
    import matplotlib.pyplot as plt

    with matplotlib.rc_context(_STYLE):
        figure, axes = plt.subplots(1, len(titles), figsize=(5.2 * len(titles), 3.9), squeeze=False)
        for axis, (data, title) in zip(axes[0], titles.items(), strict=True):
            _panel(axis, [row for row in rows if row["data"] == data], title)
        axes[0][0].set_ylabel("test accuracy, %")
        _legend(figure, rows)
        figure.tight_layout(rect=(0, 0.1, 1, 1))
        for suffix, options in ((".svg", {"metadata": {"Date": None}}), (".png", {"dpi": 160})):
            with atomic_path(path.with_suffix(suffix)) as temporary:
                figure.savefig(temporary, format=suffix[1:], **options)
        plt.close(figure)


def _panel(axis: Any, rows: Sequence[Row], title: str) -> None:
    means = mean_over_seeds(rows, "accuracy")
    sparsities = sorted({s for _, c, s in means if c != DENSE})
    for method, criterion in dict.fromkeys((m, c) for m, c, _ in means if c != DENSE):
        values = [means[method, DENSE, 0.0], *(means[method, criterion, s] for s in sparsities)]
        strong = criterion == "opd"
        axis.plot(
            range(len(values)),
            [100 * v for v in values],
            color=_COLOURS.get(criterion, "black"),
            linestyle=_DASHES[method],
            linewidth=2.4 if strong else 1.3,
            zorder=3 if strong else 2,
            alpha=1.0 if strong else 0.85,
        )
    axis.set_title(title, loc="left", fontweight="bold")
    axis.set_xticks(range(len(sparsities) + 1), ["0", *(f"{100 * s:.0f}" for s in sparsities)])
    axis.set_xlabel("sparsity, % (evenly spaced marks)")
    axis.margins(x=0.02)
    axis.set_ylim(top=101.5)


def _legend(figure: Any, rows: Sequence[Row]) -> None:
    from matplotlib.lines import Line2D

    criteria = in_order(row["criterion"] for row in rows if row["criterion"] != DENSE)
    methods = list(dict.fromkeys(row["method"] for row in rows))
    handles = [
        Line2D([], [], color="#333333", linestyle=_DASHES[m], linewidth=2, label=METHOD_NAMES[m]) for m in methods
    ]
    handles += [
        Line2D([], [], color=_COLOURS.get(c, "black"), linewidth=2.4 if c == "opd" else 1.6,
               label=CRITERION_NAMES.get(c, c))
        for c in criteria
    ]  # fmt: skip
    figure.legend(handles=handles, loc="lower center", ncols=len(handles), frameon=False, handlelength=1.9,
                  columnspacing=1.2, handletextpad=0.5, fontsize=9)  # fmt: skip
