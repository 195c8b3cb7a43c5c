"""The highest compression of the LeNets on MNIST: table, figure and drawing from finished runs.

    python benchmarks/record_compacted.py
    python benchmarks/record_lenet.py
    shaver run record-300-100 --out runs/record-300-100
    python benchmarks/record.py runs/record-300-100 --out docs/results

Writes record.csv, record.svg (error over non-zero weights) and record_network.svg (all weights of one LeNet-300-100:
that of the first seed at 100×), and prints the table. Rows of an earlier record.csv are kept.
"""

import argparse
import math
import re
import statistics
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Curve
from matplotlib.ticker import NullLocator
from torch import Tensor, nn

import shaver
from shaver import zoo
from shaver.io import load_state, write_csv
from shaver.lab.run.results import CELLS, ROWS, read_rows

Row = dict[str, Any]
NETWORKS = {
    "lenet-300-100": "LeNet-300-100 (266,610)",
    "lenet-caffe": "LeNet-5-Caffe (431,080)",
    "lenet-mnist": "the paper's LeNet (60,170)",
}
METHODS = {
    "spam": ("SpaM, OPD while training", "#d55e00", "o"),
    "map": ("gradual magnitude pruning", "#0072b2", "s"),
    "afterwards": ("SpaM, OPD after training", "#e69f00", "D"),
    "repaired": ("the same, repaired", "#009e73", "P"),
    "vd": ("Sparse VD", "#cc79a7", "^"),
    "l0": ("L0 gates", "#56b4e9", "v"),
}
#: The same with dropout of the inputs.
DROPPED = {
    "spam": ("SpaM, input dropout", "#7f0000", "o"),
    "map": ("gradual magnitude pruning, input dropout", "#053061", "s"),
    "vd": ("Sparse VD, input dropout", "#7a0177", "^"),
    "l0": ("L0 gates, input dropout", "#08519c", "v"),
}
#: Network → method, compression and error as their papers have them, and where in the figure its name stands in points.
#: Biases and epochs are counted differently there.
PUBLISHED = {
    "lenet-300-100": [("DNS", 56, 1.99, (6, 0)), ("Sparse VD", 68, 1.92, (6, 0))],
    "lenet-caffe": [
        ("DNS", 111, 0.91, (0, -9)),
        ("Bayesian compression", 156, 1.0, (0, 9)),
        ("Sparse VD", 280, 0.75, (6, 0)),
    ],
}
HOLLOW = "published"
#: Compression of the network that is drawn.
DRAWN = 100
FIELDS = (
    "task", "method", "dropout", "epochs", "seed", "parameters", "nonzeros", "biases", "compression", "error", "file",
    "seconds",
)  # fmt: skip
POSITIVE, NEGATIVE, INK = "#d55e00", "#0072b2", "#333333"


def network_of(cell: Path) -> nn.Module:
    """The trained network of a cell."""
    saved = load_state(cell / "model.safetensors")
    model = zoo.rebuild(saved["network"])
    model.load_state_dict(saved["weights"])
    return model.eval()


def bytes_on_disk(model: nn.Module) -> int:
    """The size of what `shaver.save` writes, all files together."""
    with tempfile.TemporaryDirectory() as folder:
        place = Path(folder) / "network"
        shaver.save(model, place)
        return sum(file.stat().st_size for file in place.rglob("*") if file.is_file())


def rows_of(run: Path) -> list[tuple[Row, Path]]:
    """The finished cells of a run: their row and their folder."""
    found = []
    for cell in sorted((run / CELLS).iterdir()):
        for row in read_rows(cell / ROWS):
            sizes = {"parameters": int(row["parameters"]), "nonzeros": int(row["nonzeros"])}
            done: Row = {name: row[name] for name in ("task", "method", "epochs", "seed")} | sizes
            done["compression"] = round(sizes["parameters"] / sizes["nonzeros"], 1)
            done["error"] = round(100 * (1 - float(row["accuracy"])), 2)
            network = network_of(cell)
            done["dropout"] = network.arguments.get("dropout", 0)
            done["biases"] = sum(int((p != 0).sum()) for p in network.parameters() if p.ndim == 1)
            done["file"] = bytes_on_disk(network)
            done["seconds"] = round(float(row["train_seconds"]))
            found.append((done, cell))
    return found


def look(row: Row) -> tuple[str, str, str]:
    """Label, colour and marker of a training."""
    return (DROPPED if float(row["dropout"]) else METHODS)[row["method"]]


def grouped(rows: list[Row]) -> dict[tuple[str, str, int, str], list[Row]]:
    """The trainings that differ in their seed only, by network, label, compression (of rivals 0) and epochs."""
    groups: dict[tuple[str, str, int, str], list[Row]] = defaultdict(list)
    for row in rows:
        # two digits, as units without weights differ a little between seeds; rivals find their own
        times = int(float(f"{float(row['compression']):.2g}")) if row["method"] in ("spam", "map") else 0
        groups[row["task"], look(row)[0], times, str(row["epochs"])].append(row)
    return groups


def table(rows: list[Row]) -> str:
    """One line per network, method and compression: mean and standard deviation over seeds."""
    lines = [
        "| network | method | epochs | seeds | compression | non-zero | biases | test error, % | bytes on disk |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for (task, label, _, epochs), mine in grouped(rows).items():
        errors = [float(row["error"]) for row in mine]
        spread = f" ± {statistics.stdev(errors):.2f}" if len(mine) > 1 else ""
        columns = ("compression", "nonzeros", "biases", "file")
        means = {name: statistics.mean(float(row[name]) for row in mine) for name in columns}
        lines.append(
            f"| {NETWORKS[task]} | {label} | {epochs} | {len(mine)} | {means['compression']:.0f}× "
            f"| {means['nonzeros']:,.0f} | {means['biases']:,.0f} | {statistics.mean(errors):.2f}{spread} "
            f"| {means['file']:,.0f} |"
        )
    return "\n".join(lines)


def draw_errors(rows: list[Row], path: Path) -> None:
    """Test error over non-zero weights: a point per training, a line per method and length, and what was published."""
    tasks = [task for task in NETWORKS if any(row["task"] == task for row in rows)]
    figure, panels = pyplot.subplots(1, len(tasks), figsize=(4.2 * len(tasks), 4.0), squeeze=False)
    for axis, task in zip(panels[0], tasks, strict=True):
        mine = [row for row in rows if row["task"] == task]
        total = int(mine[0]["parameters"])
        usual = min(int(row["epochs"]) for row in mine if row["method"] in ("spam", "map"))
        for (label, colour, marker), epochs in dict.fromkeys((look(row), int(row["epochs"])) for row in mine):
            groups = [group for key, group in grouped(mine).items() if key[1] == label and int(key[3]) == epochs]
            points = [[(int(row["nonzeros"]), float(row["error"])) for row in group] for group in groups]
            means = sorted(tuple(statistics.mean(values) for values in zip(*one, strict=True)) for one in points)
            if len(means) > 1:
                axis.plot(*zip(*means, strict=True), color=colour, lw=1.2, alpha=0.7)
            for one in points:
                axis.scatter(*zip(*one, strict=True), color=colour, marker=marker, s=26, alpha=0.75, label=label, lw=0)
            if epochs > usual and label in (METHODS["spam"][0], METHODS["vd"][0]):
                axis.annotate(
                    f"{epochs} epochs", means[0], (-5, -3), textcoords="offset points", fontsize=7.5, color=colour,
                    ha="right", va="center",
                )  # fmt: skip
        for name, times, error, offset in PUBLISHED.get(task, []):
            axis.scatter([total / times], [error], facecolor="white", edgecolor=INK, s=30, zorder=3, label=HOLLOW)
            axis.annotate(
                name, (total / times, error), offset, textcoords="offset points", fontsize=7.5, color=INK,
                ha="right" if offset[0] < 0 else "left", va="center",
            )  # fmt: skip
        _dress(axis, total, NETWORKS[task])
    known = {label: mark for axis in panels[0] for mark, label in zip(*axis.get_legend_handles_labels(), strict=True)}
    looks = (*METHODS.values(), *DROPPED.values())
    order = [label for label, *_ in looks if label in known] + [HOLLOW] * (HOLLOW in known)
    figure.tight_layout(rect=(0, 0.11, 1, 1))
    figure.legend([known[label] for label in order], order, fontsize=8.5, loc="lower center", ncols=5, frameon=False)
    _save(figure, path)


def _dress(axis: Axes, total: int, title: str) -> None:
    """Axes of one panel: the number of weights below, the compression above."""
    axis.set_xscale("log")
    axis.margins(0.3, 0.12)
    low, high = axis.get_xlim()
    counts = _ticks((600, 800, 1500, 2000, 4000, 10_000, 3000, 30_000, 700), low, high)
    axis.set_xticks(counts, [f"{count:,}" for count in counts], fontsize=8)
    times = _ticks((100, 68, 280, 10, 400, 150, 30, 200, 4, 85, 75), total / high, total / low)
    above = axis.secondary_xaxis("top", functions=2 * (lambda count: total / count.clip(1e-9),))
    above.set_xticks(times, [f"{one}×" for one in times], fontsize=8)
    for one in (axis.xaxis, above.xaxis):
        one.set_minor_locator(NullLocator())
    axis.set_xlabel("non-zero weights and biases")
    axis.set_ylabel("test error, %")
    axis.tick_params(axis="y", labelsize=8)
    axis.set_title(title, fontsize=10)
    axis.grid(axis="y", lw=0.4, alpha=0.5)
    axis.spines["right"].set_visible(False)


def _ticks(among: tuple[int, ...], low: float, high: float) -> list[int]:
    """Those between two limits, the first ones before others that are too near to them on a logarithmic scale."""
    chosen: list[int] = []
    for tick in among:
        if low <= tick <= high and all(abs(math.log(tick / one)) > 0.12 * math.log(high / low) for one in chosen):
            chosen.append(tick)
    return chosen


def draw_network(model: nn.Module, path: Path) -> None:
    """Every weight that is left of a LeNet-300-100, from the pixels to the digits."""
    weights = [layer.weight.detach() for layer in model.modules() if isinstance(layer, nn.Linear)]
    places = [_pixels(), *_columns(weights)]
    figure = pyplot.figure(figsize=(11, 7.0))
    axis = figure.add_axes((0.0, 0.0, 1.0, 1.0))
    axis.set_xlim(-1.5, 90)
    axis.set_ylim(-15.5, 42.7)
    axis.axis("off")
    axis.add_patch(pyplot.Rectangle((-0.7, -0.7), 28.4, 28.4, facecolor="#f4f4f4", edgecolor="#bbbbbb", lw=0.6))
    used = (weights[0] != 0).sum(0)
    seen = used > 0
    axis.scatter(*places[0][seen].T, c=used[seen].float().sqrt(), cmap="Greys", vmin=-1, s=16, marker="s", zorder=3)
    for number, weight in enumerate(weights):
        _draw_edges(axis, weight, places[number], places[number + 1], bend=(0.55, 0.5, 0.5)[number])
    for number, (weight, place) in enumerate(zip(weights[:2], places[1:3], strict=True)):
        alive = (weight != 0).any(1) | (weights[number + 1] != 0).any(0)
        axis.scatter(*place[alive].T, s=9, color="white", edgecolor=INK, linewidth=0.7, zorder=3)
        axis.text(float(place[alive][0, 0]), -13.5, f"{int(alive.sum())} of {len(alive)} units", ha="center", color=INK)
    for digit, (x, y) in enumerate(places[3].tolist()):
        axis.text(x + 1.2, y, str(digit), fontsize=15, va="center", color=INK, zorder=4)
    axis.text(13.5, -13.5, f"{int(seen.sum())} of 784 pixels", ha="center", color=INK)
    _save(figure, path)


def _pixels() -> Tensor:
    """The positions of the 28 × 28 inputs, as a picture."""
    index = torch.arange(784)
    return torch.stack([index % 28, 27 - index // 28], 1).float()


def _columns(weights: list[Tensor]) -> list[Tensor]:
    """Positions of hidden units and outputs: each layer in the order of the centres of what it reads and feeds."""
    heights = [torch.zeros(0)] * 3
    heights[2] = torch.linspace(34, -6, 10)  # the digits in their order
    order = heights[2]
    for number in (1, 0):
        reads = weights[number + 1].abs().T
        feeds = (reads @ order) / reads.sum(1).clamp_min(1e-9)
        alive = (weights[number] != 0).any(1) | (weights[number + 1] != 0).any(0)
        rank = torch.where(alive, feeds, torch.inf).argsort().argsort().float()
        heights[number] = -11 + 50 * rank / max(1, int(alive.sum()) - 1)
        order = heights[number]
    return [
        torch.stack([torch.full_like(height, x), height], 1)
        for height, x in zip(heights, (52.0, 71.0, 86.0), strict=True)
    ]


def _draw_edges(axis: Axes, weight: Tensor, start: Tensor, end: Tensor, bend: float) -> None:
    """Curves in three strengths and two colours, each kind as one path to keep the file small."""
    targets, sources = weight.nonzero(as_tuple=True)
    size = weight[targets, sources].abs()
    third = torch.searchsorted(size.quantile(torch.tensor([1 / 3, 2 / 3])), size)
    for strength, is_positive in ((s, p) for s in range(3) for p in (False, True)):
        chosen = (third == strength) & ((weight[targets, sources] > 0) == is_positive)
        points: list[tuple[float, float]] = []
        for (x0, y0), (x1, y1) in zip(start[sources[chosen]].tolist(), end[targets[chosen]].tolist(), strict=True):
            middle = x0 + bend * (x1 - x0)
            points += [(x0, y0), (middle, y0), (middle, y1), (x1, y1)]
        if points:
            codes = [Curve.MOVETO, Curve.CURVE4, Curve.CURVE4, Curve.CURVE4] * (len(points) // 4)
            look = {"lw": (0.25, 0.35, 0.6)[strength], "alpha": (0.25, 0.4, 0.65)[strength], "zorder": 1 + strength / 3}
            colour = POSITIVE if is_positive else NEGATIVE
            axis.add_patch(PathPatch(Curve(points, codes), facecolor="none", edgecolor=colour, **look))


def _save(figure: Any, path: Path) -> None:
    """Write an SVG file with coordinates of two decimals, which halves its size."""
    figure.savefig(path, metadata={"Date": None})
    # numbers below 1 keep their decimals: the glyphs are scaled by 0.015625
    path.write_text(re.sub(r"([1-9]\d*\.\d\d)\d+", r"\1", path.read_text(encoding="utf-8")), encoding="utf-8")
    pyplot.close(figure)


def main() -> None:
    """Gather the rows of all runs, print the table and draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", type=Path, nargs="*", help="folders of shaver run; none to draw record.csv as it is")
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    given = parser.parse_args()
    pyplot.rcParams["svg.hashsalt"] = "record"
    found = [pair for run in given.runs for pair in rows_of(run)]
    key = ("task", "method", "dropout", "epochs", "seed", "nonzeros")
    rows = {tuple(str(row[k]) for k in key): row for row in read_rows(given.out / "record.csv")}
    rows |= {tuple(str(row[k]) for k in key): row for row, _ in found}
    methods = list(METHODS)
    ordered = sorted(
        rows.values(),
        key=lambda r: (
            r["task"],
            methods.index(r["method"]),
            float(r["dropout"]),
            round(float(r["compression"])),
            int(r["seed"]),
        ),
    )
    write_csv(given.out / "record.csv", [{name: row[name] for name in FIELDS} for row in ordered])
    print(table(ordered))
    draw_errors(ordered, given.out / "record.svg")
    ours = [pair for pair in found if (pair[0]["task"], pair[0]["method"]) == ("lenet-300-100", "spam")]
    if ours:
        _, cell = min(ours, key=lambda pair: (int(pair[0]["seed"]), abs(pair[0]["compression"] - DRAWN)))
        draw_network(network_of(cell), given.out / "record_network.svg")


if __name__ == "__main__":
    main()
