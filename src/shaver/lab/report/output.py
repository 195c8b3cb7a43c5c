"""``shaver report``: run folders in; tables, figures and one page out."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console

from shaver.io import write_text
from shaver.lab.report import FORMATS
from shaver.lab.report.figures import write_figures
from shaver.lab.report.formats import comma_separated, latex, markdown, terminal
from shaver.lab.report.frame import Experiment, experiments, load_histories, load_runs
from shaver.lab.report.names import METRICS
from shaver.lab.report.page import RunFolder, render_page
from shaver.lab.report.tables import Table, quality_table, scoring_table, size_table, summary_table, training_table
from shaver.lab.run.results import read_study
from shaver.naming import check_name

if TYPE_CHECKING:
    from pandas import DataFrame

PAGE = "report.html"
_FILES = {"markdown": (".md", markdown), "csv": (".csv", comma_separated), "latex": (".tex", latex)}


@dataclass(frozen=True)
class Study:
    """One or more run folders, read."""

    experiments: Sequence[Experiment]  # what was measured
    histories: "DataFrame"  # training curves
    sources: Sequence[RunFolder]  # the folders
    scale: str  # the one scale of all of them


def read_runs(folders: Sequence[Path]) -> Study:
    """Read run folders for a report."""
    if not folders:
        raise ValueError("a report needs at least one run folder, such as runs/lenet-mnist-cpu.")
    import pandas

    frames, histories = [], []
    sources: list[RunFolder] = []
    titles: dict[tuple[str, str], str] = {}
    for folder in {folder.resolve(): folder for folder in folders}.values():
        frames.append(load_runs(folder).assign(folder=str(folder)))
        if frames[-1].empty:
            raise ValueError(f"{folder} has results without a single row; `shaver run` with its recipe makes them.")
        source = RunFolder(folder, read_study(folder), tuple(sorted((folder / "pictures").glob("*.svg"))))
        sources.append(source)
        name = source.recipe["name"]
        histories.append(load_histories(folder, name, source.study["cells"]))
        titles |= {(name, task["name"]): task["title"] for task in source.recipe["tasks"]}
    frame = pandas.concat(frames, ignore_index=True)
    scales = frame.groupby("scale", sort=False).folder.unique()
    if len(scales) > 1:
        what = "; ".join(f"{scale}: {', '.join(where)}" for scale, where in scales.items())
        raise ValueError(f"runs of different scales do not belong in one table ({what}); report them separately.")
    found = experiments(frame.drop(columns="folder"), titles)
    return Study(found, pandas.concat(histories, ignore_index=True), sources, str(frame.scale.iloc[0]))


def tables_of(study: Study) -> list[Table]:
    """Every table of a report."""
    found: list[Table | None] = [summary_table(study.experiments)]
    found += [quality_table(e, metric) for e in study.experiments for metric in METRICS]
    found += [size_table(experiment) for experiment in study.experiments if experiment.criteria]
    found += [training_table(study.experiments), scoring_table(study.experiments)]
    return [table for table in found if table is not None]


def write_report(
    folders: Sequence[Path], out: Path | None = None, *, formats: Sequence[str] = FORMATS, console: Console
) -> list[Path]:
    """Write the report of one or more runs.

    Args:
        folders: Folders of ``shaver run`` or of the demo.
        out: Where files go; one run's report goes beside its results, that of several into ``report``.
        formats: Which of :data:`~shaver.lab.report.FORMATS`.
        console: For the tables in the terminal: the summary and those of accuracy.

    Returns:
        The files that were written: ``tables/``, ``figures/`` and ``report.html``.
    """
    for name in formats:
        check_name("format", name, FORMATS)
    study = read_runs(folders)
    place = out or (study.sources[0].folder if len(study.sources) == 1 else Path("report"))
    tables = tables_of(study)
    if "terminal" in formats:
        for table in tables:
            if table.name == "summary" or table.name.endswith("-accuracy"):
                console.print(terminal(table, console.width))
    written = []
    for name in (name for name in _FILES if name in formats):
        suffix, render = _FILES[name]
        for table in tables:
            written.append(place / "tables" / f"{table.name}{suffix}")
            write_text(written[-1], render(table))
    if drawn := [name for name in ("svg", "png") if name in formats]:
        written += write_figures(study.experiments, study.histories, place / "figures", drawn)
    if "html" in formats:
        written.append(place / PAGE)
        write_text(written[-1], render_page(study.experiments, study.histories, study.sources, study.scale))
    return written
