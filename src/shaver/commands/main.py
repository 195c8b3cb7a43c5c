"""The command line: one function per command, whose docstring is its help. Each imports its work when it is called."""

import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import tyro
from rich.console import Console

from shaver import __version__
from shaver.commands.options import (
    CompactOptions,
    DemoOptions,
    ExportOptions,
    ListOptions,
    PruneOptions,
    ReportOptions,
    RunOptions,
)
from shaver.naming import check_name

_ABOUT = "Train networks that prune well, prune them, and show what is left. `shaver --version` prints the version."


def demo(options: Annotated[DemoOptions, tyro.conf.arg(name="")]) -> None:
    """Train, prune and measure two small networks on data that come with the installation.

    Breast cancer (a fully connected network) and 8×8 digits (a small convolutional one) are trained by MAP (ordinary
    training with weight decay) and by SpaM, pruned by every criterion to eleven sparsities, and measured on test data.
    Tables appear in the terminal; a page with everything (report.html), results.csv, a figure and the trained networks
    go into a folder. It takes about a minute on two cores.
    """
    from shaver.commands.demo import run_demo  # torch takes seconds to import; --help should not

    run_demo(options, Console())


def prune(options: Annotated[PruneOptions, tyro.conf.arg(name="")]) -> None:
    """Prune a trained network, measure it before and after, and write it back smaller.

    Example: `shaver prune runs/lenet --sparsity 0.95 --data mnist --out small`. The network can come from shaver.fit,
    from the demo (`shaver prune runs/demo/models/digits-spam-0.safetensors --sparsity auto --data digits`), or from
    anywhere, as a state dict and a function that builds it (`--factory`). The file given is never changed.
    A causal language model: `shaver prune MODEL_FOLDER --calibration text.txt --sparsity 0.5 --out sparse`.
    """
    if options.calibration is not None:
        from shaver.commands.language_model import run_language_model

        run_language_model(options, Console())
        return
    from shaver.commands.prune import run_prune

    run_prune(options, Console())


def compact(options: Annotated[CompactOptions, tyro.conf.arg(name="")]) -> None:
    """Remove whole channels, units and heads of a trained network: a smaller dense network that runs faster.

    Example: `shaver compact runs/lenet --sparsity 0.8 --target flops --data mnist --finetune 5 --out small`. The small
    network is checked to compute what the masked one does. The file given is never changed.
    """
    from shaver.commands.compact import run_compact

    run_compact(options, Console())


def export(options: Annotated[ExportOptions, tyro.conf.arg(name="")]) -> None:
    """Write a network for other programs: `shaver export small --onnx`."""
    from shaver.commands.export import run_export

    run_export(options, Console())


def run(options: Annotated[RunOptions, tyro.conf.arg(name="")]) -> None:
    """Run an experiment of the paper: train its networks, prune them by every criterion, measure, write a table.

    Example: `shaver run lenet-mnist --epochs 5 --seeds 1 --priors parameter unit`. Finished cells are not run again,
    interrupted ones (Ctrl-C, a crash) continue where they were, and a cell that fails does not stop the others.
    """
    from shaver.commands.run import run_recipe

    run_recipe(options, Console())


def report(options: Annotated[ReportOptions, tyro.conf.arg(name="")]) -> None:
    """Show the results of runs: tables in the terminal and as files, figures, and one page for any browser.

    Example: `shaver report runs/lenet-mnist-cpu runs/fcn-mnist-cpu --out report`. The page is one file that can
    be read offline.
    """
    from shaver.commands.report import run_report

    run_report(options, Console())


def list_recipes(options: Annotated[ListOptions, tyro.conf.arg(name="")]) -> None:
    """List the experiments: their place in the paper, run time on two cores, and how much of them is done."""
    from shaver.commands.list import recipe_table

    Console().print(recipe_table(options.runs))


_COMMANDS: dict[str, Callable[..., None]] = {
    "compact": compact,
    "demo": demo,
    "export": export,
    "list": list_recipes,
    "prune": prune,
    "report": report,
    "run": run,
}


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
        if given and not given[0].startswith("-"):
            check_name("command", given[0], _COMMANDS)
        tyro.extras.subcommand_cli_from_dict(_COMMANDS, prog="shaver", description=_ABOUT, args=given or ["--help"])
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, RuntimeError) as error:  # what users can act on, without a traceback
        print(f"shaver: {error}", file=sys.stderr)
        return 1
    return 0
