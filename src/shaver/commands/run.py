"""``shaver run``: run a recipe and write its folder of results."""

import ast
from pathlib import Path
from typing import Any

from rich.console import Console

from shaver.commands.options import RunOptions
from shaver.lab.run.engines import Engine, LocalEngine, SlurmEngine
from shaver.lab.run.runner import Outcome, default_folder, run_study
from shaver.naming import check_count


def run_run(options: RunOptions, console: Console) -> None:
    """Run a recipe, or show it."""
    recipe = options.chosen()
    if options.show:
        console.print(str(recipe), highlight=False, markup=False, soft_wrap=True)
        return
    folder = options.out or default_folder(recipe)
    outcome = run_study(recipe, folder, engine=_engine(options, folder), any_code=options.any_code, console=console)
    console.print(
        f"{outcome.done} cells done ({outcome.ran} of them now), {outcome.rows} rows in [bold]{folder}/results.csv[/]; "
        f"`shaver report {folder}` shows them."
    )
    if outcome.kept is not None:
        console.print(
            f"The folder held results of other settings; they are now in {outcome.kept}, and their cells stay.",
            style="yellow", highlight=False, soft_wrap=True,
        )  # fmt: skip
    show_problems(outcome, console)


def show_problems(outcome: Outcome, console: Console) -> None:
    """Name the networks that are no better than guessing, and raise an error that names the cells that failed."""
    if outcome.unlearned:
        listed = "\n".join(f"  {label}: accuracy {100 * found:.1f} %" for label, found in outcome.unlearned.items())
        console.print(
            f"WARNING: {len(outcome.unlearned)} of {outcome.done} networks did not learn: they are as good as "
            f"guessing. Reports leave them out of every mean. A smaller learning rate usually helps.\n{listed}",
            style="bold red", highlight=False, markup=False, soft_wrap=True,
        )  # fmt: skip
    if outcome.failed:
        by_error: dict[str, list[str]] = {}
        for label, error in outcome.failed.items():
            by_error.setdefault(error, []).append(label)
        listed = "\n".join(f"{'; '.join(labels)}:\n  {error}" for error, labels in by_error.items())
        raise RuntimeError(
            f"{len(outcome.failed)} cells failed (tracebacks are in {outcome.folder}/cells/*/error.txt).\n{listed}"
        )


def _engine(options: RunOptions, folder: Path) -> Engine:
    if options.processes is not None:
        check_count("--processes", options.processes)
    if options.engine == "slurm":
        return SlurmEngine(folder / "slurm", _pairs(options.slurm), slots=options.processes)
    if options.slurm:
        raise ValueError(f"--slurm {' '.join(options.slurm)} has an effect only with --engine slurm.")
    return LocalEngine(options.processes)


def _pairs(texts: tuple[str, ...]) -> dict[str, Any]:
    pairs: dict[str, Any] = {}
    for text in texts:
        key, equals, value = text.partition("=")
        if not key or not equals:
            raise ValueError(f"--slurm takes KEY=VALUE, such as timeout_min=240, not {text!r}.")
        try:
            pairs[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            pairs[key] = value
    return pairs
