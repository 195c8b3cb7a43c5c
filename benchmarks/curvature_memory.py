"""Peak memory of a function, measured as the peak resident set of a forked child."""

import ctypes
import gc
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Measured:
    """The report of the child.

    Attributes:
        memory: Rise of the peak resident set in bytes; NaN after an error.
        seconds: Wall time of the call after a warm-up.
        value: The function's result.
        error: The exception in one line, or empty.
    """

    memory: float
    seconds: float
    value: int
    error: str


def measure(function: Callable[[], int], *, seconds: float, limit: int) -> Measured:
    """Run ``function`` in a forked child with at most ``limit`` more bytes of address space.

    Freed memory is returned to the system first, because a child that reuses it would show no rise.
    """
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        _report(writer, function, limit)
        os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        ready, _, _ = select.select([pipe], [], [], seconds)
        if not ready:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            return Measured(float("nan"), seconds, 0, f"one batch took more than {seconds:.0f} s")
        text = pipe.read()
    _, status = os.waitpid(child, 0)
    if not text:
        return Measured(float("nan"), 0.0, 0, f"the process died ({signal.Signals(os.WTERMSIG(status)).name})")
    return Measured(**json.loads(text))


def _report(writer: int, function: Callable[[], int], limit: int) -> None:
    before = _peak()
    in_use = int(Path("/proc/self/statm").read_text().split()[0]) * os.sysconf("SC_PAGE_SIZE")
    resource.setrlimit(resource.RLIMIT_AS, (in_use + limit, in_use + limit))
    value, error, elapsed = 0, "", 0.0
    try:
        for _ in range(2):  # the first call of a kernel is slow
            start = time.perf_counter()
            value = function()
            elapsed = time.perf_counter() - start
            if elapsed > 2:
                break
    except BaseException as problem:  # the child must report every kind of failure
        error = one_line(problem, limit)
    memory = float("nan") if error else float(_peak() - before)
    report = {"memory": memory, "seconds": elapsed, "value": value, "error": error}
    os.write(writer, json.dumps(report).encode())
    os.close(writer)


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def one_line(problem: BaseException, limit: int = 0) -> str:
    """An exception as a short note for a table."""
    text = " ".join(str(problem).split())
    if isinstance(problem, MemoryError) or "can't allocate memory" in text:
        return f"needs more than {limit / 2**30:.0f} GiB"
    name = type(problem).__name__
    text = text if len(text) <= 110 else text[:107] + "…"
    return text if name == "Unsupported" else f"{name}: {text}"
