"""The progress of a study: a live table in a terminal, or a line every few seconds if the output goes to a file."""

import time
from collections import Counter
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from shaver.lab.recipes.grid import Cell, seconds_by_cell
from shaver.lab.recipes.recipe import Recipe

#: Seconds between two lines outside a terminal.
_SECONDS = 10.0


class Progress:
    """Prints a line for each finished cell, and shows the running ones, how many are done, and the time left."""

    def __init__(self, console: Console, recipe: Recipe, cells: list[Cell]) -> None:
        self._console, self._recipe, self._cells = console, recipe, cells
        self._status: dict[str, dict[str, Any]] = {}
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._weights = seconds_by_cell(recipe) or {}
        self._began = self._said = self._idle = time.monotonic()

    def __enter__(self) -> "Progress":
        earlier = sum(bool(status.get("earlier")) for status in self._status.values())
        count = f"{len(self._cells)} cell{'s' * (len(self._cells) != 1)}"
        known = f", {earlier} of them done earlier" if earlier else ""
        self._console.print(f"[bold]{self._recipe.title}[/] ({self._recipe.scale} scale): {count}{known}")
        if self._recipe.note:
            self._console.print(f"smaller than in the paper: {self._recipe.note}", style="yellow")
        if self._live is not None:
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def set(self, cell: Cell, status: dict[str, Any]) -> None:
        """Set the status of a cell."""
        before = self._status.get(cell.key, {}).get("state")
        self._status[cell.key] = status
        if status.get("state") in ("done", "failed") and before != status["state"] and not status.get("earlier"):
            self._say_end(cell, status)

    def refresh(self) -> None:
        """Draw the table again. Outside a terminal, print a line if the last one is some seconds old."""
        if self.share_done() == 0:
            self._idle = time.monotonic()
        if self._live is not None:
            self._live.update(self._table(), refresh=True)
        elif time.monotonic() - self._said >= _SECONDS:
            doing = [f"{c.label}: {s['note']}" for c in self._cells if (s := self._of(c)).get("note")]
            self._print(f"{self._summary()}; {'; '.join(doing)}" if doing else self._summary())

    def share_done(self) -> float:
        """The share of this call's work that is done; cells that were done earlier do not count."""
        done = total = 0.0
        for cell in self._cells:
            status, weight = self._of(cell), self._weights.get(cell.key, 1.0)
            if not status.get("earlier"):
                over = status.get("state") in ("done", "failed")
                done, total = done + weight * (1.0 if over else float(status.get("share", 0.0))), total + weight
        return done / total if total else 1.0

    def _of(self, cell: Cell) -> dict[str, Any]:
        return self._status.get(cell.key, {})

    def _print(self, text: str) -> None:
        self._console.print(text, highlight=False, soft_wrap=True)
        self._said = time.monotonic()

    def _say_end(self, cell: Cell, status: dict[str, Any]) -> None:
        if status["state"] == "failed":
            self._print(f"[red]failed[/] {cell.label}: {first_line(status['error'])}")
            return
        if status.get("learned") is False:
            self._print(
                f"[bold red]did not learn[/] {cell.label}: accuracy {100 * status['accuracy']:.1f} %, as by guessing"
            )
        place = sum(s.get("state") in ("done", "failed") for s in self._status.values())
        self._print(f"{place}/{len(self._cells)} {cell.label}, {_duration(status.get('seconds', 0))}{self._left()}")

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=self._summary(), caption_justify="left")
        table.add_column("cell", overflow="fold")
        table.add_column("progress", min_width=20)
        table.add_column("doing", overflow="ellipsis", no_wrap=True)
        table.add_column("time", justify="right")
        for cell in (cell for cell in self._cells if self._of(cell).get("state") in ("running", "waiting")):
            status = self._of(cell)
            bar = ProgressBar(status["of"], status.get("done", 0), width=20) if status.get("of") else ""
            table.add_row(cell.label, bar, status.get("note", "waiting"), _duration(status.get("seconds", 0)))
        return table

    def _summary(self) -> str:
        states = Counter(status.get("state") for status in self._status.values())
        over = states["done"] + states["failed"]
        failed = f", {states['failed']} failed" if states["failed"] else ""
        elapsed = _duration(time.monotonic() - self._began)
        return f"{over} of {len(self._cells)} cells done{failed}, {elapsed}{self._left()}"

    def _left(self) -> str:
        """The time left at the pace since work began: starting processes says nothing about it."""
        share = self.share_done()
        if not 0.02 < share < 1:
            return ""
        return f", about {_duration((time.monotonic() - self._idle) * (1 - share) / share)} left"


def first_line(text: str) -> str:
    """The first line, followed by … if there are more."""
    line, _, rest = text.partition("\n")
    return line + (" …" if rest else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
