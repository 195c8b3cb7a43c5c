"""Where cells run: processes on this machine, or jobs of a Slurm cluster. Both call ``run_cell`` on a folder."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from shaver.lab.run.cell import LOG, run_cell
from shaver.lab.run.results import read_status
from shaver.naming import require

_QUEUED = 100


@dataclass(frozen=True)
class Running:
    """A cell that has been started.

    Attributes:
        poll: Returns ``None`` while it runs, then ``""``; or a few words if something else ended it.
        stop: Ends it now; its files stay complete.
    """

    poll: Callable[[], str | None]
    stop: Callable[[], object]


class Engine(Protocol):
    """Starts cells."""

    slots: int  # how many cells run at once

    def start(self, folder: Path, store: Path, any_code: bool) -> Running:
        """Start the cell of a folder."""

    def close(self) -> None:
        """Release what was kept between cells."""


class LocalEngine:
    """Processes with one torch thread each, so that a cell that dies takes no other with it.

    A process runs one cell after the other, as importing torch takes seconds.

    Args:
        slots: How many run at once; the number of cores if left out.
    """

    def __init__(self, slots: int | None = None) -> None:
        self.slots = slots or os.cpu_count() or 1
        self._idle: list[subprocess.Popen[bytes]] = []

    def start(self, folder: Path, store: Path, any_code: bool) -> Running:
        """Give the cell to an idle process, or to a new ``python -m shaver.lab.run.cell``."""
        alive = [process for process in self._idle if process.poll() is None]
        process = alive.pop() if alive else _new_process()
        self._idle = alive
        assert process.stdin is not None
        process.stdin.write(json.dumps([str(folder), str(store), any_code]).encode() + b"\n")
        process.stdin.flush()
        return Running(partial(self._poll, process, folder), partial(_end, process))

    def _poll(self, process: "subprocess.Popen[bytes]", folder: Path) -> str | None:
        code = process.poll()
        if code is None:
            if read_status(folder).get("state") not in ("done", "failed"):
                return None
            self._idle.append(process)
            return ""
        if code < 0:
            return f"the process was ended by signal {-code}" + (" (out of memory?)" if code == -9 else "")
        return "" if code == 0 else f"the process ended with code {code}; see {LOG}"

    def close(self) -> None:
        """End the idle processes."""
        for process in self._idle:
            _end(process)
        self._idle = []


def _new_process() -> "subprocess.Popen[bytes]":
    # In a session of its own: Ctrl-C reaches the study, which then ends its cells in good order.
    return subprocess.Popen(
        [sys.executable, "-m", "shaver.lab.run.cell"],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"},
        start_new_session=True,
    )


def _end(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(10)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdin is not None:
        process.stdin.close()


class SlurmEngine:
    """A Slurm job for each cell, through submitit.

    Args:
        folder: Where submitit keeps its scripts and logs.
        options: Options of submitit's executor: ``{"slurm_partition": "gpu", "timeout_min": 240, "mem_gb": 8}``.
        slots: Jobs in the queue at once, 100 if left out.
        cluster: ``"slurm"``; ``"local"`` runs the same jobs as processes here, to try a set-up.

    Raises:
        ImportError: Submitit is missing.
        ValueError: An option it does not know.
    """

    def __init__(
        self,
        folder: Path,
        options: Mapping[str, Any] | None = None,
        *,
        slots: int | None = None,
        cluster: str = "slurm",
    ) -> None:
        submitit = require("submitit", "--engine slurm", "slurm")
        self.slots = _QUEUED if slots is None else slots
        try:
            self._executor = submitit.AutoExecutor(folder=str(folder), cluster=cluster)
            self._executor.update_parameters(**{"cpus_per_task": 1, "name": "shaver", **(options or {})})
        except (NameError, ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"submitit did not take the options {dict(options or {})}: {error}") from error

    def start(self, folder: Path, store: Path, any_code: bool) -> Running:
        """Submit one job."""
        job = self._executor.submit(run_cell, str(folder.absolute()), str(store.absolute()), any_code)
        return Running(partial(_poll_job, job), job.cancel)

    def close(self) -> None:
        """Nothing is kept between jobs."""


def _poll_job(job: Any) -> str | None:
    if not job.done():
        return None
    error = job.exception()
    return "" if error is None else f"job {job.job_id} failed: {str(error).strip().splitlines()[-1]}"
