"""``shaver prune MODEL_FOLDER --calibration text.txt``: prune a causal language model block by block."""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from shaver.commands.options import LAYERS, UNITS, PruneOptions
from shaver.integrations.model_folder import PrunedFolder, prune_folder
from shaver.integrations.oneshot import OneShot, PrunedMatrix
from shaver.pruning.pruned import pattern_of

#: The options that apply to a language model with --calibration. Any other is refused.
_USED = (
    *("checkpoint", "sparsity", "out", "criterion", "repair", "scope"),
    *("calibration", "windows", "length", "column"),
)


def run_language_model(options: PruneOptions, console: Console) -> PrunedFolder:
    """Prune a model folder as the options say, and show the result."""
    assert options.calibration is not None
    given = [option for name, option in options.changed().items() if name not in _USED]
    given += ["--scope global"] if options.scope == "global" else []
    if given:
        raise ValueError(f"{', '.join(given)} does not apply to a language model with --calibration; leave it out.")
    if options.sparsity == "auto":
        raise ValueError("--sparsity auto needs a network trained with SpaM; give a share such as --sparsity 0.5.")
    scope = options.scope or "layer"
    pattern = pattern_of(scope)
    if pattern is None and scope not in ("layer", UNITS, LAYERS):
        raise ValueError(f"unknown scope {scope!r}. Valid: layer, {UNITS}, {LAYERS}, or N:M such as 2:4.")
    if (options.sparsity is None) == (pattern is None):
        raise ValueError(
            "say how much to remove: either --sparsity 0.5 or --scope 2:4; --scope units and --scope layers take "
            "--sparsity 0.25."
        )
    settings = OneShot(
        sparsity=options.sparsity,
        pattern=pattern,
        criterion=options.criterion or "opd",  # type: ignore[arg-type]
        units=scope == UNITS,
        layers=scope == LAYERS,
        repair=options.repair,
    )
    folder = options.checkpoint
    out = options.out or Path(f"{folder.resolve().name}-pruned")
    steps = "layers tried, and blocks" if settings.layers else "blocks"
    columns = (TextColumn(steps), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(steps, total=None)
        pruned = prune_folder(
            folder,
            out,
            options.calibration,
            settings,
            windows=options.windows,
            length=options.length,
            column=options.column,
            progress=lambda done, total: bar.update(task, completed=done, total=total),
        )
    console.print(_table(pruned))
    if pruned.resumed:
        console.print(f"{pruned.resumed} blocks had been finished by an interrupted call.", highlight=False)
    if settings.layers:
        gone = sorted({_place(row.name)[0] for row in pruned.matrices if not row.kept})
        console.print(f"removed layers {', '.join(map(str, gone))}", highlight=False)
    for name, (before, after) in pruned.widths.items():
        console.print(f"{name} {before:,} → {after:,}", highlight=False)
    console.print(
        f"{pruned.sparsity:.2%} of the weights of {len(pruned.matrices)} matrices removed, calibrated with "
        f"{pruned.windows[0]} windows of {pruned.windows[1]} tokens.\n"
        f"Written to {out}; AutoModelForCausalLM.from_pretrained opens it.",
        highlight=False,
        markup=False,
    )
    return pruned


def _table(pruned: PrunedFolder) -> Table:
    """One line per kind of matrix, over all blocks."""
    table = Table("matrix", box=None)
    for title in ("blocks", "weights", "kept", "output error, %"):
        table.add_column(title, justify="right")
    kinds: dict[str, list[PrunedMatrix]] = {}
    for row in pruned.matrices:
        kinds.setdefault(_place(row.name)[1], []).append(row)
    for kind, rows in kinds.items():
        error = 100 * sum(row.error for row in rows) / len(rows)
        weights, kept = sum(row.weights for row in rows), sum(row.kept for row in rows)
        table.add_row(kind, str(len(rows)), f"{weights:,}", f"{kept:,}", f"{error:.2f}")
    return table


def _place(name: str) -> tuple[int, str]:
    """The number of a matrix's block, and its name within the block."""
    parts = name.removesuffix(".weight").split(".")
    number = max(i for i, part in enumerate(parts) if part.isdigit())
    return int(parts[number]), ".".join(parts[number + 1 :])
