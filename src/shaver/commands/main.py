"""The command line: one class of options per command, whose docstring is its help."""

import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import tyro
from rich.console import Console

from shaver import __version__
from shaver.commands import options
from shaver.naming import check_name

_ABOUT = (
    "Train networks that can be pruned far, prune them, and measure the result. `shaver --version` prints the version."
)
#: Each command is the function ``run_NAME(options, console)`` in the file of its name.
_COMMANDS: dict[str, Callable[..., Any]] = {
    "compact": options.CompactOptions,
    "demo": options.DemoOptions,
    "export": options.ExportOptions,
    "list": options.ListOptions,
    "prune": options.PruneOptions,
    "report": options.ReportOptions,
    "run": options.RunOptions,
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line (``sys.argv[1:]`` without ``arguments``) and return the exit code."""
    given = list(sys.argv[1:] if arguments is None else arguments)
    if given == ["--version"]:
        print(f"shaver {__version__}")
        return 0
    try:
        if given and not given[0].startswith("-"):
            check_name("command", given[0], _COMMANDS)
        chosen = tyro.extras.subcommand_cli_from_dict(
            _COMMANDS, prog="shaver", description=_ABOUT, args=given or ["--help"]
        )
        name = "language_model" if getattr(chosen, "calibration", None) else given[0]
        module = import_module(f"shaver.commands.{name}")  # torch takes seconds to import; --help should not
        getattr(module, f"run_{name}")(chosen, Console())
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130
    except (ValueError, OSError, ImportError, RuntimeError) as error:  # what users can act on, without a traceback
        print(f"shaver: {error}", file=sys.stderr)
        return 1
    return 0
