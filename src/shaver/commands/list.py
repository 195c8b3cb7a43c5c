"""``shaver list``: every recipe, its run time, and how much of it is done."""

from collections import Counter
from pathlib import Path

from rich import box
from rich.console import Console
from rich.table import Table

from shaver.commands.options import ListOptions
from shaver.lab.recipes.catalogue import get_recipe, recipe_names
from shaver.lab.recipes.grid import expected_seconds
from shaver.lab.recipes.recipe import SCALES
from shaver.lab.run.results import read_status, read_study
from shaver.lab.run.runner import at_work


def run_list(options: ListOptions, console: Console) -> None:
    """Print one line per recipe. Times are for ``cpu`` scale on two cores; the status is that of the last call."""
    table = Table(
        box=box.SIMPLE_HEAD, pad_edge=False, title="shaver run NAME", title_justify="left", title_style="bold"
    )
    for heading in ("name", "experiment", "in the paper"):
        table.add_column(heading, overflow="fold", no_wrap=heading == "name")
    table.add_column("time", justify="right", no_wrap=True)
    table.add_column("status", overflow="fold")
    for name in recipe_names():
        recipe = get_recipe(name)
        status = "\n".join(filter(None, (_status(options.runs / f"{name}-{scale}", scale) for scale in SCALES)))
        table.add_row(name, recipe.title, recipe.paper, _rough(expected_seconds(recipe)), status or "–")
    table.caption = (
        "time: at cpu scale on two cores, from the start. Recipes share trained networks, so later ones take less."
    )
    table.caption_justify = "left"
    console.print(table)


def _status(folder: Path, scale: str) -> str:
    """How many cells of the last call are done; empty if there was none."""
    if not folder.is_dir():
        return ""
    try:
        keys = read_study(folder)["cells"]
    except (OSError, ValueError):
        return f"{folder} is damaged"
    states = Counter(read_status(folder / "cells" / key).get("state", "waiting") for key in keys)
    if states["running"] and not at_work(folder):  # killed before it could record that
        states["interrupted"] += states.pop("running")
    text = f"{states['done']}/{len(keys)} done"
    text += "".join(f", {states[kind]} {kind}" for kind in ("running", "failed", "interrupted") if states[kind])
    return text if scale == "cpu" else f"paper: {text}"


def _rough(seconds: float | None) -> str:
    if seconds is None:
        return "unknown"
    if seconds < 90:
        return f"{max(1, round(seconds / 10)) * 10} s"
    minutes = seconds / 60
    return f"{minutes:.0f} min" if minutes < 90 else f"{minutes / 60:.1f} h"
