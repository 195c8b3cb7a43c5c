"""Independent jobs on a few processes, with bars that show how far each is; an error in a job is shown, not lost."""

import multiprocessing
import os
import queue
import sys
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from typing import Any, TypeVar

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

Job = TypeVar("Job")
Result = TypeVar("Result")
#: ``report(steps, note)``: this many steps of the job are done; the note is shown beside the bar.
Report = Callable[[int, str], None]


class JobFailed(RuntimeError):
    """A job raised an error in its process; the message holds its traceback."""


_reports: Any = None


def run_jobs(
    function: Callable[[Job, Report], Result],
    jobs: Sequence[tuple[str, Job, int]],
    *,
    processes: int,
    console: Console,
) -> list[Result]:
    """Run ``function(job, report)`` for every job, and return the results in the order of the jobs.

    Processes are spawned with one torch thread each: on a few cores that beats many threads in one process.

    Args:
        function: Importable by name, as every spawned process imports it anew.
        jobs: The name of the bar a job belongs to, the job, and its number of steps. Jobs may share a bar.
        processes: How many run at once.
        console: Where the bars appear, if it is a terminal.

    Raises:
        JobFailed: With the traceback of the first job that failed; jobs that have not begun are dropped.
    """
    context = multiprocessing.get_context("spawn")
    reports = context.Queue()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f} %"),
        TextColumn("[dim]{task.fields[note]}", justify="left"),
        TimeElapsedColumn(),
    )
    with (
        Progress(*columns, console=console, disable=not console.is_terminal) as progress,
        ProcessPoolExecutor(processes, context, initializer=_begin, initargs=(reports,)) as pool,
    ):
        bars = {name: progress.add_task(name, total=0, note="", start=False) for name, _, _ in jobs}
        for name, _, steps in jobs:
            progress.update(bars[name], total=(progress.tasks[bars[name]].total or 0) + steps)
        futures = [pool.submit(_call, function, name, job) for name, job, _ in jobs]
        pending = set(futures)
        while pending:
            done, pending = wait(pending, timeout=0.1, return_when=FIRST_EXCEPTION)
            _drain(reports, progress, bars)
            if failed := next((f for f in done if f.exception() is not None), None):
                pool.shutdown(wait=False, cancel_futures=True)
                raise _explain(jobs[futures.index(failed)][0], failed.exception())
        _drain(reports, progress, bars)
        for bar in bars.values():  # the last reports may still be on their way
            progress.update(bar, completed=progress.tasks[bar].total)
            progress.stop_task(bar)
    return [future.result() for future in futures]


def _begin(reports: Any) -> None:
    global _reports
    _reports = reports
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # read when the job imports torch
    if (torch := sys.modules.get("torch")) is not None:
        torch.set_num_threads(1)


def _call(function: Callable[[Job, Report], Result], name: str, job: Job) -> Result:
    try:
        return function(job, lambda steps, note: _reports.put((name, steps, note)))
    except Exception as error:  # tracebacks do not travel between processes; their text does
        raise JobFailed(f"{type(error).__name__}: {error}\n\n{traceback.format_exc()}") from None


def _drain(reports: Any, progress: Progress, bars: dict[str, Any]) -> None:
    while True:
        try:
            name, steps, note = reports.get_nowait()
        except queue.Empty:
            return
        progress.start_task(bars[name])
        progress.update(bars[name], advance=steps, note=note)


def _explain(name: str, error: BaseException | None) -> JobFailed:
    if isinstance(error, BrokenProcessPool):
        return JobFailed(f"the process of {name} ended abruptly (killed, or out of memory); see the messages above.")
    return JobFailed(f"{name} failed: {error}")
