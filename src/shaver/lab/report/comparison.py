"""The table of ``shaver prune`` and ``shaver compact``: the same measures before and after."""

from collections.abc import Callable
from dataclasses import dataclass, replace

from rich import box
from rich.table import Table

from shaver.lab.run.sweep import Row


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
    _Line("nonzeros", "  of them not zero", "{:,}".format, _ratio),
    _Line("bytes_dense", "bytes in memory", "{:,}".format, _nothing),
    _Line("bytes_stored", "bytes on disk (shaver.save)", "{:,}".format, _ratio),
    _Line("flops", "FLOPs a sample", "{:,}".format, _nothing),
    _Line("flops_sparse", "  of them with a weight not zero", "{:,}".format, _ratio),
    _Line("latency_1", "milliseconds for 1 sample", lambda v: f"{1000 * v:.3f}", _nothing),
    _Line("latency_128", "milliseconds for 128", lambda v: f"{1000 * v:.3f}", _nothing),
)


#: What counts non-zeros says nothing of a network that is smaller; everything else falls then.
_SMALLER = tuple(
    replace(line, change=_ratio) if line.change is _nothing else line
    for line in _LINES
    if line.key not in ("nonzeros", "flops_sparse")
)


def before_and_after(before: Row, after: Row, data: str | None, *, smaller: bool = False) -> Table:
    """A line for each measure that there is; the change where a change means something.

    Zeros in a dense tensor are multiplied like any number, so latency has no change worth a figure unless the network
    is really smaller.
    """
    where = f" on {data}" if data is not None else "; give --data to measure accuracy"
    table = Table(title=f"Before and after{where}", title_justify="left", title_style="bold", box=box.SIMPLE_HEAD)
    table.add_column("", no_wrap=True)
    for column in ("before", "after", "change"):
        table.add_column(column, justify="right", no_wrap=True)
    for line in _SMALLER if smaller else _LINES:
        if line.key in before:
            old, new = before[line.key], after[line.key]
            table.add_row(line.title, line.show(old), line.show(new), line.change(old, new, line.show))
    return table
