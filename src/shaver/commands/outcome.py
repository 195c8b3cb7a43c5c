"""The result of a command on a network: measures before and after, their table, and the folder it is written to."""

import math
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rich import box
from rich.table import Table
from torch import nn

from shaver.commands.subject import Subject
from shaver.files import save
from shaver.files.folder import PLAN
from shaver.io import write_json
from shaver.lab.run.folder import Row
from shaver.measure import cost, quality
from shaver.pruning import Masks

#: What a command leaves beside a network: how it was made, and the network in another format.
PRUNING, COMPACTION, ONNX = "pruning.json", "compact.json", "network.onnx"


def check_free(out: Path) -> None:
    """Refuse a folder in which something else would be mixed up with the network."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / PLAN).exists())):
        raise ValueError(
            f"--out {out} exists and holds something else; choose a new folder, or one that --out wrote before."
        )


def measure_network(model: nn.Module, subject: Subject) -> Row:
    """Quality where there are data, size always, work and time where there is an input."""
    row = quality_of(model, subject)
    parameters = list(model.parameters())
    row |= {
        "parameters": sum(p.numel() for p in parameters),
        "nonzeros": sum(int(p.detach().count_nonzero()) for p in parameters),
        "bytes_dense": sum(p.numel() * p.element_size() for p in [*parameters, *model.buffers()]),
    }
    with tempfile.TemporaryDirectory() as folder:  # what the files really take, headers and all
        row["bytes_stored"] = size_of(save(model, folder))
    if subject.example is not None:
        measured = cost(model, subject.example).as_dict()
        row |= {key: measured[key] for key in ("flops", "flops_sparse", "latency_1", "latency_128")}
    return row


def quality_of(model: nn.Module, subject: Subject) -> Row:
    """Accuracy and the like on the test data; nothing where there are none."""
    if subject.data is None:
        return {}
    row: Row = quality(model, subject.data.test.batches, likelihood=subject.likelihood).as_dict()
    del row["count"]
    return row


def size_of(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(file.stat().st_size for file in folder.iterdir())


def write_network(out: Path, model: nn.Module, report: Mapping[str, Any], name: str, masks: Masks | None = None) -> int:
    """Write a network and the report of how it was made, and return the bytes of the network's own files.

    A new folder appears complete or not at all. In a folder that holds an earlier network, ``save`` replaces that
    network in one step, and what was derived from it (its report, an exported file) is removed first.

    Args:
        out: The folder; :func:`check_free` has accepted it.
        model: The network.
        report: Plain values.
        name: The file of the report: :data:`PRUNING` or :data:`COMPACTION`.
        masks: Of a pruned network.
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
            out.rmdir()  # check_free saw that it is empty
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _finite(value: Any) -> Any:
    """JSON has no infinity: what is not finite becomes null."""
    if isinstance(value, Mapping):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _difference(before: float, after: float, show: Callable[[float], str]) -> str:
    return ("+" if after >= before else "−") + show(abs(after - before))


def _ratio(before: float, after: float, show: Callable[[float], str]) -> str:
    return f"÷ {before / after:.1f}" if after else ""


def _nothing(before: float, after: float, show: Callable[[float], str]) -> str:
    return ""


@dataclass(frozen=True)
class _Line:
    key: str
    title: str
    show: Callable[[float], str]
    change: Callable[[float, float, Callable[[float], str]], str]


_LINES = (
    _Line("accuracy", "accuracy, %", lambda v: f"{100 * v:.2f}", _difference),
    _Line("rmse", "root mean squared error", "{:.4g}".format, _difference),
    _Line("nll", "negative log likelihood", "{:.4f}".format, _difference),
    _Line("ece", "calibration error (ECE)", "{:.4f}".format, _difference),
    _Line("brier", "Brier score", "{:.4f}".format, _difference),
    _Line("parameters", "parameters", "{:,}".format, _nothing),
    _Line("nonzeros", "  non-zero", "{:,}".format, _ratio),
    _Line("bytes_dense", "bytes in memory", "{:,}".format, _nothing),
    _Line("bytes_stored", "bytes on disk (shaver.save)", "{:,}".format, _ratio),
    _Line("flops", "FLOPs per sample", "{:,}".format, _nothing),
    _Line("flops_sparse", "  with a non-zero weight", "{:,}".format, _ratio),
    _Line("latency_1", "milliseconds for 1 sample", lambda v: f"{1000 * v:.3f}", _nothing),
    _Line("latency_128", "milliseconds for 128", lambda v: f"{1000 * v:.3f}", _nothing),
)


#: For a smaller network, counts of non-zeros say nothing, and everything else changes.
_SMALLER = tuple(
    replace(line, change=_ratio) if line.change is _nothing else line
    for line in _LINES
    if line.key not in ("nonzeros", "flops_sparse")
)


def before_and_after(
    before: Row, after: Row, data: str | None, *, smaller: bool = False, unrepaired: Row | None = None
) -> Table:
    """One line per measure that there is, with the change where it means something.

    Zeros in a dense tensor are multiplied like any number, so the latency changes only if the network is smaller.
    ``unrepaired`` is the quality with the same weights removed and no repair, shown in a column of its own.
    """
    where = f" on {data}" if data is not None else "; give --data to measure accuracy"
    table = Table(title=f"Before and after{where}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for column in ("before", "after", "change") if unrepaired is None else ("dense", "pruned", "repaired", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in _SMALLER if smaller else _LINES:
        if line.key in before:
            old, new = before[line.key], after[line.key]
            shown = [old, new] if unrepaired is None else [old, (after | unrepaired)[line.key], new]
            table.add_row(line.title, *map(line.show, shown), line.change(old, new, line.show))
    return table
