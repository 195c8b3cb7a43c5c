"""Results as tables: CSV files for programs, aligned columns with the best marked for people."""

import csv
import io
import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from shaver.io import write_text
from shaver.study.sweep import DENSE, Row

METHOD_NAMES = {"map": "MAP", "spam": "SpaM", "l1": "L1"}
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


def write_rows(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as CSV, with the columns of all of them, atomically."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    text = io.StringIO()
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def mean_over_seeds(rows: Sequence[Row], value: str) -> dict[tuple[str, str, float], float]:
    """``(method, criterion, sparsity) → mean``, for the rows of one data set."""
    groups: dict[tuple[str, str, float], list[float]] = defaultdict(list)
    for row in rows:
        groups[row["method"], row["criterion"], row["sparsity"]].append(row[value])
    return {key: statistics.fmean(values) for key, values in groups.items()}


def accuracy_table(rows: Sequence[Row], title: str) -> Table:
    """Accuracy in percent: a line for each method and criterion, a column for each sparsity, the best marked."""
    means = mean_over_seeds(rows, "accuracy")
    sparsities = sorted({s for _, c, s in means if c != DENSE})
    seeds = len({row["seed"] for row in rows})
    averaged = f", mean of {seeds} seeds" if seeds > 1 else ""
    table = _table(f"{title}: test accuracy over sparsity, both in %{averaged}")
    table.add_column("trained, pruned by", no_wrap=True)
    for sparsity in [0.0, *sparsities]:
        table.add_column("dense" if sparsity == 0 else f"{100 * sparsity:.0f}", justify="right", no_wrap=True)
    best = {s: max(v for (_, _, t), v in means.items() if t == s) for s in [0.0, *sparsities]}
    for method in dict.fromkeys(m for m, _, _ in means):
        for name in in_order(c for m, c, _ in means if m == method and c != DENSE):
            values = [means[method, DENSE, 0.0], *(means[method, name, s] for s in sparsities)]
            cells = [_mark(v, v >= best[s] - 1e-9) for v, s in zip(values, [0.0, *sparsities], strict=True)]
            table.add_row(f"{METHOD_NAMES[method]:<4} {CRITERION_NAMES.get(name, name)}", *cells)
        table.add_section()
    return table


def cost_table(rows: Sequence[Row]) -> Table:
    """Size, work and time of dense and pruned networks."""
    table = _table("Cost, dense and masked: smaller when stored sparse, not faster to run")
    table.add_column("data, trained", no_wrap=True)
    columns = (
        "spar-\nsity %",
        "para-\nmeters",
        "non-\nzero",
        "kB\ndense",
        "kB\nsparse",
        "kFLOP\ndense",
        "kFLOP\nsparse",
    )
    for column in (*columns, "ms for\n1", "ms for\n128"):
        table.add_column(column, justify="right", no_wrap=True)
    last = None
    for row in rows:
        if last is not None and row["data"] != last:
            table.add_section()
        last = row["data"]
        table.add_row(
            f"{row['data']} {METHOD_NAMES[row['method']]}",
            "dense" if row["sparsity"] == 0 else f"{100 * row['sparsity']:.1f}",
            str(row["parameters"]),
            str(row["nonzeros"]),
            *(f"{row[key] / 1000:.1f}" for key in ("bytes_dense", "bytes_sparse")),
            *(f"{row[key] / 1000:.0f}" for key in ("flops", "flops_sparse")),
            *(f"{1000 * row[key]:.2f}" for key in ("latency_1", "latency_128")),
        )
    return table


def in_order(criteria: Iterable[str]) -> list[str]:
    """The criteria without repeats: those with a name here in its order, then the others."""
    given = list(dict.fromkeys(criteria))
    return [c for c in CRITERION_NAMES if c in given] + [c for c in given if c not in CRITERION_NAMES]


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, padding=0, pad_edge=False)


def _mark(value: float, best: bool) -> str:
    text = f"{100 * value:.1f}" if value < 0.9995 else "100"  # four characters, so that a line fits a terminal
    return f"[bold green]{text}[/]" if best else text
