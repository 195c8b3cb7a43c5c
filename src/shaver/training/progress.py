"""A progress bar: the epoch, the loss, the numbers of the last epoch, and the remaining time."""

import sys
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn


class TrainingProgress(Progress):
    """A bar on standard error, for ``epochs`` of ``batches`` each, of which some are ``done``.

    ``shown=None`` shows it if standard error is a terminal.
    """

    def __init__(self, method: str, epochs: int, batches: int, done: int, *, shown: bool | None) -> None:
        hidden = not (sys.stderr.isatty() if shown is None else shown)
        texts = [TextColumn(text) for text in ("{task.description}", "{task.fields[numbers]}", "left")]
        columns = (texts[0], BarColumn(), texts[1], TimeRemainingColumn(), texts[2])
        super().__init__(*columns, console=Console(stderr=True, quiet=hidden), disable=hidden)
        self._method, self._epochs, self._last = method, epochs, ""
        self._bar = self.add_task(self._describe(done), total=epochs * batches, completed=done * batches, numbers="")

    def _describe(self, done: int) -> str:
        return f"{self._method}  epoch {min(done + 1, self._epochs)}/{self._epochs}"

    def add_batches(self, batches: int, loss: float) -> None:
        """Advance by some batches; ``loss`` is the mean of the epoch so far."""
        if not self.disable:
            self.update(self._bar, advance=batches, numbers=f"loss {loss:.4f}{self._last}")

    def end_epoch(self, row: dict[str, Any]) -> None:
        """Show the numbers of a completed epoch."""
        shown = {"valid_accuracy": "  valid {:.2%}", "log_evidence": "  evidence {:.0f}"}
        self._last = "".join(text.format(row[key]) for key, text in shown.items() if row.get(key) is not None)
        numbers = f"loss {row['loss']:.4f}{self._last}"
        self.update(self._bar, description=self._describe(row["epoch"]), numbers=numbers)
