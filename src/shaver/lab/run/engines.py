"""Where cells run: processes here, or jobs of a Slurm cluster. Both do ``run_cell`` on a folder; files say the rest."""

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from shaver.lab.run.cell import run_cell

ENGINES = ("local", "slurm")
_LOG = "log.txt"
_QUEUED = 100


class Running(Protocol):
    """A cell that has been started."""

    def poll(self) -> str | None:
        """``None`` while it runs; then ``""``, or in a few words how it ended other than by itself."""
        ...

    def stop(self) -> None:
        """End it now; its files stay whole."""
        ...


class Engine(Protocol):
    """Starts cells."""

    @property
    def slots(self) -> int:
        """How many cells run at once."""
        ...

    def start(self, folder: Path, store: Path, any_code: bool) -> Running:
        """Start the cell of a folder."""
        ...


@dataclass(frozen=True)
class LocalEngine:
    """A process for each cell with one torch thread, so that a cell that dies takes no other with it.

    Attributes:
        slots: How many run at once.
    """

    slots: int = field(default_factory=lambda: os.cpu_count() or 1)

    def start(self, folder: Path, store: Path, any_code: bool) -> Running:
        """Start ``python -m shaver.lab.run.cell``."""
        command = [sys.executable, "-m", "shaver.lab.run.cell", str(folder), "--store", str(store), "--end-with-parent"]
        threads = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
        with open(folder / _LOG, "ab") as log:
            # In a session of its own: Ctrl-C reaches the study, which then ends its cells in good order.
            return _Process(
                subprocess.Popen(
                    command + ["--any-code"] * any_code,
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    env=os.environ | threads,
                    start_new_session=True,
                )
            )


class _Process:
    def __init__(self, process: "subprocess.Popen[bytes]") -> None:
        self._process = process

    def poll(self) -> str | None:
        code = self._process.poll()
        if code is None:
            return None
        if self._process.stdin is not None:
            self._process.stdin.close()
        if code < 0:
            return f"the process was ended by signal {-code}" + (" (out of memory?)" if code == -9 else "")
        return "" if code in (0, 1) else f"the process ended with code {code}; see {_LOG}"

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self.poll()


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
        try:
            import submitit
        except ImportError as error:
            raise ImportError('--engine slurm needs submitit: pip install "shaver[slurm]".') from error
        self.slots = _QUEUED if slots is None else slots
        try:
            self._executor = submitit.AutoExecutor(folder=str(folder), cluster=cluster)
            self._executor.update_parameters(**{"cpus_per_task": 1, "name": "shaver", **(options or {})})
        except (NameError, ValueError, TypeError, RuntimeError) as error:
            raise ValueError(f"submitit did not take the options {dict(options or {})}: {error}") from error

    def start(self, folder: Path, store: Path, any_code: bool) -> Running:
        """Submit one job."""
        return _Job(self._executor.submit(run_cell, str(folder.absolute()), str(store.absolute()), any_code))


class _Job:
    def __init__(self, job: Any) -> None:
        self._job = job

    def poll(self) -> str | None:
        if not self._job.done():
            return None
        error = self._job.exception()
        return "" if error is None else f"job {self._job.job_id} failed: {str(error).strip().splitlines()[-1]}"

    def stop(self) -> None:
        self._job.cancel()
