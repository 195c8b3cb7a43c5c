"""A progress bar: the epoch, the loss, the numbers of the last epoch, and the remaining time."""

import sys
from types import TracebackType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as RichProgress


class Progress:
    """Shows a bar on standard error, or nothing.

    Args:
        method: The label of the bar.
        epochs: Epochs of the whole training.
        batches: Batches per epoch.
        done: Number of completed epochs.
        shown: Whether to show a bar. ``None``: if standard error is a terminal.
    """

    def __init__(self, method: str, epochs: int, batches: int, done: int, *, shown: bool | None) -> None:
        self._label, self._epochs, self._epoch = method, epochs, done
        self._last = ""
        self._bar: RichProgress | None = None
        self._task = TaskID(0)
        if sys.stderr.isatty() if shown is None else shown:
            columns = (
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.fields[numbers]}"),
                TimeRemainingColumn(),
                TextColumn("left"),
            )
            self._bar = RichProgress(*columns, console=Console(stderr=True))
            self._task = self._bar.add_task(
                self._describe(), total=epochs * batches, completed=done * batches, numbers=""
            )

    def __enter__(self) -> "Progress":
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def _describe(self) -> str:
        return f"{self._label}  epoch {min(self._epoch + 1, self._epochs)}/{self._epochs}"

    def advance(self, batches: int, loss: float) -> None:
        """Advance by some batches; ``loss`` is the mean of the epoch so far."""
        if self._bar is not None:
            self._bar.update(
                self._task, advance=batches, description=self._describe(), numbers=f"loss {loss:.4f}{self._last}"
            )

    def end_epoch(self, row: dict[str, Any]) -> None:
        """Show the numbers of a completed epoch."""
        self._epoch = row["epoch"]
        shown = {"valid_accuracy": "  valid {:.2%}", "log_evidence": "  evidence {:.0f}"}
        self._last = "".join(text.format(row[key]) for key, text in shown.items() if row.get(key) is not None)
        if self._bar is not None:
            self._bar.update(self._task, numbers=f"loss {row['loss']:.4f}{self._last}")
