"""The command line: reads the options, calls the study, prints."""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.markup import escape

from shaver import __version__
from shaver.commands.compact_options import CompactOptions, ExportOptions
from shaver.commands.pruning_options import PruningOptions
from shaver.commands.run_options import RunOptions
from shaver.lab.report.formats import FORMATS, Format

_ABOUT = "Train networks that shave well, shave them, and show what is left. `shaver --version` prints the version."


def demo(
    out: Path = Path("runs/demo"), seed: int = 0, repeats: int = 3, epochs: int | None = None, processes: int = 2
) -> None:
    """Train, prune and measure two small networks on data that come with the installation.

    Breast cancer (a fully connected network) and 8×8 digits (a small convolutional one) are trained by MAP and by
    SpaM, pruned by every criterion to ten sparsities, and measured on test data. Tables appear in the terminal; a
    page with everything (report.html), results.csv, figures and the trained networks go into a folder.

    Args:
        out: Folder for the results; it is created, and files of an earlier run in it are replaced.
        seed: First seed. The same seed gives the same numbers.
        repeats: How many seeds to average over.
        epochs: Passes over the data, instead of each network's own number; 1 is a quick look.
        processes: Networks that train at the same time, one thread each.
    """
    from shaver.lab.run.demo import run_demo  # torch takes seconds to import; --help should not

    console = Console()
    run_demo(out, seed=seed, repeats=repeats, epochs=epochs, processes=processes, console=console)
    page = escape(str(out / "report.html"))
    console.print(
        f"\nOpen [bold]{page}[/] in a browser. Beside it: results.csv, tables, figures, models.", soft_wrap=True
    )


def prune(options: Annotated[PruningOptions, tyro.conf.arg(name="")]) -> None:
    """Prune a trained network, measure it before and after, and write it back smaller.

    Example: `shaver prune runs/lenet --sparsity 0.95 --data mnist --out small`. The network can come from shaver.fit,
    from the demo (`shaver prune runs/demo/models/digits-spam-0.safetensors --sparsity auto --data digits`), or from
    anywhere, as a state dict and a function that builds it (`--factory`). The file given is never changed.
    """
    from shaver.commands.prune import run_prune

    run_prune(options, Console())


def compact(options: Annotated[CompactOptions, tyro.conf.arg(name="")]) -> None:
    """Remove whole channels, units and heads of a trained network: a smaller dense network, measured faster.

    Example: `shaver compact runs/lenet --sparsity 0.8 --target flops --data mnist --finetune 5 --out small`. The small
    network is checked to compute what the masked one does. The file given is never changed.
    """
    from shaver.commands.compact import run_compact

    run_compact(options, Console())


def export(options: Annotated[ExportOptions, tyro.conf.arg(name="")]) -> None:
    """Write a network for other programs: `shaver export small --onnx`."""
    from shaver.commands.compact import run_export

    run_export(options, Console())


def run(options: Annotated[RunOptions, tyro.conf.arg(name="")]) -> None:
    """Run an experiment of the paper: train its networks, prune them by every criterion, measure, write a table.

    Example: `shaver run lenet-mnist --epochs 5 --seeds 1 --priors parameter unit`. What is done is not done again, and
    what was interrupted (Ctrl-C, a crash) goes on where it was; a cell that fails does not stop the others.
    """
    from shaver.commands.run import run_recipe

    run_recipe(options, Console())


def report(
    runs: Annotated[tuple[Path, ...], tyro.conf.Positional],
    out: Path | None = None,
    formats: tuple[Format, ...] = FORMATS,
) -> None:
    """Show what runs found: tables here and as files, the figures, and one page that opens in any browser.

    Example: `shaver report runs/lenet-mnist-cpu runs/fcn-mnist-cpu --out report`. The page is one file, readable
    offline, and needs nothing else.

    Args:
        runs: Folders of `shaver run` or `shaver demo`, of one scale.
        out: Folder for tables/, figures/ and report.html; a single run's own folder, or report/ for several.
        formats: What to make.
    """
    from shaver.lab.report.report import write_report

    console = Console()
    written = write_report(runs, out, formats=formats, console=console)
    for path in (path for path in written if path.suffix == ".html"):
        console.print(f"\nOpen [bold]{escape(str(path))}[/] in a browser.", soft_wrap=True)
    if others := [path for path in written if path.suffix != ".html"]:
        folders = dict.fromkeys(str(path.parent) for path in others)
        console.print(f"{len(others)} tables and figures are in {escape(', '.join(folders))}.", soft_wrap=True)


def list_recipes(runs: Path = Path("runs")) -> None:
    """List the experiments: what each stands for in the paper, how long it takes here, and how far it is.

    Args:
        runs: The folder in which run folders are looked for.
    """
    from shaver.lab.run.listing import recipe_table

    Console().print(recipe_table(runs))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code.

    Args:
        arguments: Instead of ``sys.argv[1:]``.
    """
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"shaver {__version__}")
        return 0
    try:
        tyro.extras.subcommand_cli_from_dict(
            {
                "compact": compact,
                "demo": demo,
                "export": export,
                "list": list_recipes,
                "prune": prune,
                "report": report,
                "run": run,
            },
            prog="shaver",
            description=_ABOUT,
            args=given or ["--help"],
        )
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, RuntimeError) as error:  # what users can act on, without a traceback
        print(f"shaver: {error}", file=sys.stderr)
        return 1
    return 0
