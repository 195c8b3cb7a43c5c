"""The progress of a study: a table that lives in a terminal, or a line for each cell that ends elsewhere."""

import time
from collections import Counter
from types import TracebackType
from typing import Any

from rich import box
from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from shaver.lab.recipes.grid import Cell
from shaver.lab.recipes.recipe import Recipe

#: How many cells that are over are shown besides the running ones.
_SHOWN = 6
_MARKS = {"done": "[green]done[/]", "failed": "[red]failed[/]", "running": "runs", "waiting": "waits"}


class Progress:
    """Shows the cells that run, the last ones that ended, and how many there are of each kind."""

    def __init__(self, console: Console, recipe: Recipe, cells: list[Cell]) -> None:
        self._console, self._recipe, self._cells = console, recipe, cells
        self._status: dict[str, dict[str, Any]] = {}
        self._over: list[Cell] = []
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._began = time.monotonic()

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
        """A cell's newest status."""
        before = self._status.get(cell.key, {}).get("state")
        self._status[cell.key] = status
        if status.get("state") in ("done", "failed") and before != status["state"] and not status.get("earlier"):
            self._over.append(cell)
            self._say(cell, status)

    def refresh(self) -> None:
        """Draw the table anew."""
        if self._live is not None:
            self._live.update(self._table(), refresh=True)

    def _say(self, cell: Cell, status: dict[str, Any]) -> None:
        place = sum(s.get("state") in ("done", "failed") for s in self._status.values())
        if status["state"] == "failed":
            self._console.print(
                f"[red]failed[/] {cell.label}: {first_line(status['error'])}", highlight=False, soft_wrap=True
            )
        elif self._live is None:
            self._console.print(
                f"{place}/{len(self._cells)} {cell.label}, {_duration(status.get('seconds', 0))}", highlight=False
            )

    def _table(self) -> Table:
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, caption=self._summary(), caption_justify="left")
        table.add_column("cell", overflow="fold")
        table.add_column("")
        table.add_column("progress", min_width=20)
        table.add_column("doing", overflow="ellipsis", no_wrap=True)
        table.add_column("time", justify="right")
        active = [cell for cell in self._cells if self._status.get(cell.key, {}).get("state") in ("running", "waiting")]
        for cell in [*self._over[-_SHOWN:], *active]:
            status = self._status[cell.key]
            total = status.get("of") or 0
            bar = ProgressBar(total, status.get("done", 0), width=20) if total else ""
            note = status.get("note") or first_line(status.get("error", ""))
            mark = _MARKS.get(status["state"], status["state"])
            table.add_row(cell.label, mark, bar, note, _duration(status.get("seconds", 0)))
        return table

    def _summary(self) -> str:
        states = Counter(status.get("state") for status in self._status.values())
        over = states["done"] + states["failed"]
        failed = f", {states['failed']} failed" if states["failed"] else ""
        return f"{over} of {len(self._cells)} cells over{failed}, {_duration(time.monotonic() - self._began)}"


def first_line(text: str) -> str:
    """The first line, and a sign that there are more."""
    line, _, rest = text.partition("\n")
    return line + (" …" if rest else "")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
