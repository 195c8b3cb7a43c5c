"""The result of a command on a network: measures before and after, their table, and the folder it is written to."""

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn

from shaver.commands.subject import Subject, shape_of
from shaver.files import save
from shaver.files.saved import PLAN
from shaver.io import write_json
from shaver.lab.run.results import Row
from shaver.measure import summary
from shaver.pruning import Masks

#: Files that a command writes beside a network: how it was made, and the network in another format.
PRUNING, COMPACTION, ONNX = "pruning.json", "compact.json", "network.onnx"


def measure_network(model: nn.Module, subject: Subject) -> Row:
    """Quality if there are data, size in memory and on disk, and FLOPs and time if there is an input."""
    test = None if subject.data is None else subject.data.test.batches
    row: Row = summary(model, test, subject.example, likelihood=subject.likelihood)
    with tempfile.TemporaryDirectory() as folder:  # the size of the files, headers included
        row["bytes_stored"] = size_of(save(model, folder))
    return row


def size_of(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(file.stat().st_size for file in folder.iterdir())


def show_and_write(
    subject: Subject,
    console: Console,
    model: nn.Module,
    rows: Mapping[str, Row],
    report: Mapping[str, Any],
    name: str,
    masks: Masks | None = None,
) -> None:
    """Print the table of measures, and write the network with a report of how it was made if a folder is given.

    ``rows`` has the measures ``"before"`` and ``"after"``, and perhaps ``"unrepaired"``.
    """
    before, after = rows["before"], rows["after"]
    title = None if subject.data is None else subject.data.title
    smaller = name == COMPACTION
    console.print(before_and_after(before, after, title, smaller=smaller, unrepaired=rows.get("unrepaired")))
    out = subject.options.out
    if out is not None:
        common = {"checkpoint": str(subject.options.checkpoint), "data": title, **report, **rows}
        common["input_shape"] = shape_of(subject.example)
        size = write_network(out, model, common, name, masks)
        console.print(f"{size:,} bytes written to {out}; shaver.load reads them.", highlight=False, markup=False)


def write_network(out: Path, model: nn.Module, report: Mapping[str, Any], name: str, masks: Masks | None = None) -> int:
    """Write a network and the report of how it was made, and return the bytes of the network's own files.

    A new folder appears complete or not at all. In a folder that holds an earlier network, the files derived from it
    (its report, an exported file) are removed first, and ``save`` then replaces the network in one step.
    """
    with _complete_folder(out) as folder:
        for derived in (folder / PRUNING, folder / COMPACTION, *folder.glob(f"{ONNX}*")):
            derived.unlink(missing_ok=True)
        size = size_of(save(model, folder, masks))
        write_json(folder / name, _finite(report))
    return size


@contextmanager
def _complete_folder(out: Path) -> Iterator[Path]:
    """A folder to write into that becomes ``out`` at the end; ``out`` itself if it holds an earlier network."""
    if (out / PLAN).exists():
        yield out
        return
    folder = out.parent / f".{out.name}.{os.getpid()}.part"
    folder.mkdir(parents=True)
    try:
        yield folder
        if out.exists():
            out.rmdir()  # the options were checked: it is empty
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _finite(value: Any) -> Any:
    """Replace values that are not finite by null, because JSON has no infinity."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


#: Measure → its title, how a value is written, and the kind of change: ± a difference, ÷ a ratio, or not shown. For a
#: smaller network, every change that is not a difference is a ratio, and counts of non-zeros are left out.
_LINES: dict[str, tuple[str, Callable[[float], str], str]] = {
    "accuracy": ("accuracy, %", lambda v: f"{100 * v:.2f}", "±"),
    "rmse": ("root mean squared error", "{:.4g}".format, "±"),
    "nll": ("negative log likelihood", "{:.4f}".format, "±"),
    "ece": ("calibration error (ECE)", "{:.4f}".format, "±"),
    "brier": ("Brier score", "{:.4f}".format, "±"),
    "parameters": ("parameters", "{:,}".format, ""),
    "nonzeros": ("  non-zero", "{:,}".format, "÷"),
    "bytes_dense": ("bytes in memory", "{:,}".format, ""),
    "bytes_stored": ("bytes on disk (shaver.save)", "{:,}".format, "÷"),
    "flops": ("FLOPs per sample", "{:,}".format, ""),
    "flops_sparse": ("  with a non-zero weight", "{:,}".format, "÷"),
    "latency_1": ("milliseconds for 1 sample", lambda v: f"{1000 * v:.3f}", ""),
    "latency_128": ("milliseconds for 128", lambda v: f"{1000 * v:.3f}", ""),
}


def before_and_after(
    before: Row, after: Row, data: str | None, *, smaller: bool = False, unrepaired: Row | None = None
) -> Table:
    """One line per available measure, with its change where that is meaningful.

    Zeros in a dense tensor are multiplied like any number, so the latency changes only if the network is smaller.
    ``unrepaired`` has the measures without repair, for a column of their own.
    """
    where = f" on {data}" if data is not None else "; give --data to measure accuracy"
    table = Table(title=f"Before and after{where}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for column in ("before", "after", "change") if unrepaired is None else ("dense", "pruned", "repaired", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    for key, (title, show, kind) in _LINES.items():
        if key not in before or (smaller and key in ("nonzeros", "flops_sparse")):
            continue
        old, new = before[key], after[key]
        shown = [old, new] if unrepaired is None else [old, unrepaired[key], new]
        change = ""
        if kind == "±":
            change = ("+" if new >= old else "−") + show(abs(new - old))
        elif new and (kind == "÷" or smaller):
            change = f"÷ {old / new:.1f}"
        table.add_row(title, *map(show, shown), change)
    return table
