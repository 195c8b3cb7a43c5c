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
    """The rows of an earlier call, numbers as numbers."""
    if not path.exists():
        return []
    with open(path, newline="") as file:
        return [{k: _value(k, v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]


def tidy(rows: Iterable[Row]) -> list[Row]:
    """Six digits are more than what was measured."""
    return [{k: f"{v:.6g}" if isinstance(v, float) else v for k, v in row.items()} for row in rows]


def _value(key: str, text: str) -> Any:
    return text if key in _TEXT else int(float(text)) if key in _WHOLE else float(text)


def summarise(rows: list[Row]) -> str:
    """Markdown: what uniform sparsity costs, what it is up against, free widths, and speed."""
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
    """Accuracy by training and criterion over uniform sparsity."""
    mine = [row for row in rows if bool(row["tuned"]) == tuned or row["kind"] == "dense"]
    sparsities = sorted({row["sparsity"] for row in mine if row["kind"] != "dense"})
    if not sparsities:
        return ""
    how = f"after {max(row['tuned'] for row in mine)} epochs of fine-tuning" if tuned else "before fine-tuning"
    lines = [
        f"**{name}**, the same share of each layer removed, {how}: accuracy in % (mean ± standard error, "
        f"{len({row['seed'] for row in mine})} seeds).\n",
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
    """Everything that ends in a fine-tuned or fully trained network, by how many times fewer FLOPs it takes."""
    dense = next((row for row in rows if row["kind"] == "dense"), None)
    ended = [row for row in rows if row["tuned"] and row["kind"] != "dense"]
    groups: dict[tuple[str, str, Any], list[Row]] = defaultdict(list)
    for row in ended:
        at = row.get("ratio", row["widths"] if row["part"] == "scratch" else row.get("sparsity"))
        groups[row["training"], row["kind"], at].append(row)
    lines = [
        f"**{name}** by FLOPs, at the end of each pipeline: fine-tuned, pruned while training, or trained from scratch "
        "for as long. Mean ± standard error over seeds.\n",
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
    """Mean ± standard error in percent."""
    if not values:
        return "–"
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{100 * statistics.fmean(values):.2f} ± {100 * error:.2f}"


def _trainings(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["training"] for row in rows))


def figure(rows: list[Row], path: Path) -> None:
    """Accuracy over FLOPs at the end of each pipeline, a panel an experiment: the paper's Pareto figure."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    ended = [row for row in rows if row["part"] != "speed" and (row["tuned"] or row["part"] == "scratch")]
    names = list(dict.fromkeys(row["experiment"] for row in ended))
    if not names:
        return
    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False})
    plot, axes = plt.subplots(1, len(names), figsize=(4.0 * len(names), 3.8), squeeze=False, layout="constrained")
    handles: dict[str, Any] = {}
    for axis, name in zip(axes[0], names, strict=True):
        curves: dict[str, dict[Any, list[Row]]] = defaultdict(lambda: defaultdict(list))
        for row in (r for r in ended if r["experiment"] == name):
            label = row["kind"] if row["part"] == "scratch" else f"{row['training']}, {row['kind']}"
            curves[label][row.get("ratio", row.get("sparsity", row["widths"]))].append(row)
        for label, points in curves.items():
            means = [
                {k: statistics.fmean(r[k] for r in mine) for k in ("flops", "accuracy")} for mine in points.values()
            ]
            curve = sorted((mean["flops"], 100 * mean["accuracy"]) for mean in means)
            (line,) = axis.plot(*zip(*curve, strict=True), **_style(label), ms=3.5)
            handles.setdefault(label, line)
        best = max(100 * row["accuracy"] for row in ended if row["experiment"] == name)
        axis.set(xscale="log", title=name, xlabel="FLOPs a sample", ylim=(best - 15, best + 1))
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("accuracy, %")
    plot.legend(handles.values(), handles.keys(), loc="outside lower center", ncols=3, frameon=False, fontsize=7)
    plot.savefig(path, metadata={"Date": None})


def _style(label: str) -> dict[str, Any]:
    colours = {
        "opd": "#d55e00",
        "magnitude": "#0072b2",
        "snip": "#e69f00",
        "grasp": "#cc79a7",
        "synflow": "#009e73",
        "random": "#999999",
        "gradual": "#661100",
        "torch-pruning": "#332288",
        "from scratch": "#000000",
    }
    colour = next((value for key, value in colours.items() if key in label), "#56b4e9")
    strong = "gradual" in label or label == "from scratch" or (label.startswith("SpaM") and "opd" in label)
    dashes = "--" if label.startswith("MAP") else ":" if "parameter" in label else "-"
    return {"color": colour, "linestyle": dashes, "marker": "o", "lw": 2.0 if strong else 1.0,
            "alpha": 1.0 if strong else 0.75}  # fmt: skip
