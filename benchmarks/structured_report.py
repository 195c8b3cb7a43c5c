"""Tables and the Pareto figure of structured.py."""

import csv
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from structured_speed import speed_tables

Row = dict[str, Any]
_WHOLE = ("seed", "tuned", "flops", "parameters", "bytes", "round_to", "batch", "flops_dense")
_TEXT = ("part", "experiment", "training", "kind", "split", "widths")


def read(path: Path) -> list[Row]:
    """The rows of an earlier call, with numbers converted."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [{k: _value(k, v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]


def tidy(rows: Iterable[Row]) -> list[Row]:
    """Round to six digits, which is more than the precision of the measurements."""
    return [{k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]


def _value(key: str, text: str) -> Any:
    return text if key in _TEXT else int(float(text)) if key in _WHOLE else float(text)


def summarise(rows: list[Row]) -> str:
    """Markdown tables: uniform widths, all pipelines by FLOPs, and speed."""
    parts = defaultdict(list)
    for row in rows:
        parts[row["part"]].append(row)
    texts = []
    for name in dict.fromkeys(row["experiment"] for row in parts["oneshot"]):
        texts += [_uniform(name, [row for row in parts["oneshot"] if row["experiment"] == name], tuned)
                  for tuned in (False, True)]  # fmt: skip
    against = [*parts["scratch"], *parts["free"], *parts["gradual"], *parts["rivals"]]
    for name in dict.fromkeys(row["experiment"] for row in against):
        mine = [row for row in [*parts["oneshot"], *against] if row["experiment"] == name]
        texts.append(_by_flops(name, mine))
    texts.append(speed_tables(parts["speed"]))
    return "\n".join(text for text in texts if text)


def _uniform(name: str, rows: list[Row], tuned: bool) -> str:
    """Accuracy per training and criterion over sparsity, with uniform widths."""
    mine = [row for row in rows if bool(row["tuned"]) == tuned or row["kind"] == "dense"]
    sparsities = sorted({row["sparsity"] for row in mine if row["kind"] != "dense"})
    if not sparsities:
        return ""
    how = f"after {max(row['tuned'] for row in mine)} epochs of fine-tuning" if tuned else "before fine-tuning"
    lines = [
        f"**{name}**, the same share of each layer removed, {how}: accuracy in %, {seeds_of(mine)}.\n",
        "| training | criterion | dense | " + " | ".join(f"{100 * s:.0f} %" for s in sparsities) + " |",
        "|---|---|---|" + "---|" * len(sparsities),
    ]
    dense = {t: [r["accuracy"] for r in mine if (r["training"], r["kind"]) == (t, "dense")] for t in _trainings(mine)}
    for training in _trainings(mine):
        for kind in dict.fromkeys(r["kind"] for r in mine if r["training"] == training and r["kind"] != "dense"):
            cells = []
            for sparsity in sparsities:
                values = [
                    row["accuracy"]
                    for row in mine
                    if (row["training"], row["kind"], row["sparsity"]) == (training, kind, sparsity)
                ]
                cells.append(spread(values))
            lines.append(f"| {training} | {kind} | {spread(dense[training])} | " + " | ".join(cells) + " |")
    example = {row["sparsity"]: row for row in mine if row["kind"] != "dense"}
    whole = next((row for row in mine if row["kind"] == "dense"), None)
    if whole is not None:
        for title, key in (("FLOPs ÷", "flops"), ("parameters ÷", "parameters")):
            cells = [f"{whole[key] / example[s][key]:.1f}" for s in sparsities]
            lines.append(f"| | *{title}* | | " + " | ".join(cells) + " |")
        if "latency_128" in whole:
            cells = [f"{1000 * example[s]['latency_128']:.2f}" for s in sparsities if "latency_128" in example[s]]
            lines.append(f"| | *ms for 128* | {1000 * whole['latency_128']:.2f} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _by_flops(name: str, rows: list[Row]) -> str:
    """All fine-tuned or fully trained networks, sorted by their FLOPs."""
    dense = next((row for row in rows if row["kind"] == "dense"), None)
    ended = [row for row in rows if row["tuned"] and row["kind"] != "dense"]
    groups: dict[tuple[str, str, Any], list[Row]] = defaultdict(list)
    for row in ended:
        at = row.get("ratio", row["widths"] if row["part"] == "scratch" else row.get("sparsity"))
        groups[row["training"], row["kind"], at].append(row)
    lines = [
        f"**{name}** by FLOPs, at the end of each pipeline: fine-tuned, pruned during training, or trained from "
        f"scratch for as long; {seeds_of(ended)}.\n",
        "| training | how | FLOPs ÷ | parameters ÷ | widths (first seed) | accuracy, % | NLL | ECE | Brier |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    base = {key: (dense or {}).get(key, 0) for key in ("flops", "parameters")}
    found = []
    for (training, kind, _), mine in groups.items():
        flops, parameters = (statistics.fmean(row[key] for row in mine) for key in ("flops", "parameters"))
        fewer = [f"{base[key] / value:.1f}" if base[key] else f"{value:,.0f}" for key, value in
                 (("flops", flops), ("parameters", parameters))]  # fmt: skip
        cells = [training, kind, *fewer, mine[0]["widths"], spread([row["accuracy"] for row in mine])]
        cells += [f"{statistics.fmean(row[key] for row in mine):.4f}" for key in ("nll", "ece", "brier")]
        found.append((flops, "| " + " | ".join(cells) + " |"))
    return "\n".join([*lines, *(line for _, line in sorted(found, reverse=True))]) + "\n" if found else ""


def spread(values: Sequence[float]) -> str:
    """Mean in percent, ± standard error if there are several values."""
    if not values:
        return "–"
    if len(values) == 1:
        return f"{100 * values[0]:.2f}"
    return f"{100 * statistics.fmean(values):.2f} ± {100 * statistics.stdev(values) / len(values) ** 0.5:.2f}"


def seeds_of(rows: Sequence[Row]) -> str:
    """A phrase that says how many seeds the numbers come from."""
    count = len({row["seed"] for row in rows})
    return "one seed" if count == 1 else f"mean ± standard error over {count} seeds"


def _trainings(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["training"] for row in rows))


#: Colours of the figure; a kind has the colour of the first name that it contains.
_FAMILIES = {
    "torch-pruning": "#332288",
    "gradual": "#aa3377",
    "from scratch": "#000000",
    "opd": "#d55e00",
    "magnitude": "#0072b2",
    "snip": "#e69f00",
    "grasp": "#cc79a7",
    "synflow": "#009e73",
    "random": "#999999",
}


def figure(rows: list[Row], path: Path) -> None:
    """Draw accuracy over FLOPs at the end of each pipeline, one panel per experiment: the paper's Pareto figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from matplotlib.lines import Line2D

    ended = [row for row in rows if row["part"] != "speed" and (row["tuned"] or row["kind"] == "dense")]
    names = list(dict.fromkeys(row["experiment"] for row in ended if row["tuned"]))
    if not names:
        return
    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False})
    size = (max(6.0, 4.2 * len(names)), 4.2)
    plot, axes = plt.subplots(1, len(names), figsize=size, squeeze=False, layout="constrained")
    families: dict[str, None] = {}
    for axis, name in zip(axes[0], names, strict=True):
        curves: dict[tuple[str, str], dict[Any, list[Row]]] = defaultdict(lambda: defaultdict(list))
        for row in (r for r in ended if r["experiment"] == name):
            at = row["widths"] if row["part"] == "scratch" else row.get("ratio", row.get("sparsity"))
            curves[row["training"], row["kind"]][at].append(row)
        accuracies: list[float] = []
        for (training, kind), points in curves.items():
            means = [
                {k: statistics.fmean(r[k] for r in mine) for k in ("flops", "accuracy")} for mine in points.values()
            ]
            curve = sorted((mean["flops"], 100 * mean["accuracy"]) for mean in means)
            accuracies += [accuracy for _, accuracy in curve]
            if kind == "dense":
                axis.axhline(curve[0][1], color="#bbbbbb", linestyle=_dashes(training), lw=1)
                continue
            family = next(key for key in _FAMILIES if key in kind)
            families[family] = None
            strong = family in ("gradual", "from scratch", "opd")
            axis.plot(
                *zip(*curve, strict=True), color=_FAMILIES[family], linestyle=_dashes(training),
                marker="D" if family == "gradual" else "*" if family == "from scratch" else "o",
                ms=6 if strong else 3.5, lw=1.8 if strong else 1.0, alpha=1.0 if strong else 0.7,
            )  # fmt: skip
        axis.set(xscale="log", title=name, xlabel="FLOPs per sample", ylim=_window(accuracies))
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("accuracy, %")
    handles = [Line2D([], [], color=_FAMILIES[key], label=key) for key in _FAMILIES if key in families]
    handles += [Line2D([], [], color="#555555", linestyle=_dashes(t), label=f"trained by {t}") for t in ("SpaM", "MAP")]
    handles.append(Line2D([], [], color="#bbbbbb", label="dense"))
    plot.legend(handles=handles, loc="outside lower center", ncols=4 if len(names) < 3 else 7, frameon=False)
    plot.savefig(path, metadata={"Date": None})


def _window(accuracies: Sequence[float]) -> tuple[float, float]:
    """The range of the accuracy axis: from at most ten points below the best to just above it."""
    return max(min(accuracies) - 0.5, max(accuracies) - 10), max(accuracies) + 0.5


def _dashes(training: str) -> str:
    return "--" if training.startswith("MAP") else ":" if "parameter" in training else "-"
