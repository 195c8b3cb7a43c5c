"""``shaver report``: run folders in; tables, figures and one page out."""

from rich.console import Console
from rich.markup import escape

from shaver.commands.options import ReportOptions
from shaver.lab.report.output import write_report


def run_report(options: ReportOptions, console: Console) -> None:
    """Write the report, and say where it is."""
    written = write_report(options.runs, options.out, formats=options.formats, console=console)
    for path in (path for path in written if path.suffix == ".html"):
        console.print(f"\nOpen [bold]{escape(str(path))}[/] in a browser.", soft_wrap=True)
    if others := [path for path in written if path.suffix != ".html"]:
        folders = dict.fromkeys(str(path.parent) for path in others)
        console.print(f"{len(others)} tables and figures are in {escape(', '.join(folders))}.", soft_wrap=True)
