"""Jobs on processes: results in order, and an error in a child is shown, not lost."""

import io
import os
import time

import pytest
from rich.console import Console

from shaver.lab.run.parallel import JobFailed, run_jobs


def square(number, report):
    time.sleep(0.05 * (3 - number))  # the first job ends last
    report(1, f"squared {number}")
    return number * number


def fail(number, report):
    raise ZeroDivisionError(f"job {number} went wrong")


def die(number, report):
    os._exit(9)


def threads(number, report):
    import torch

    return torch.get_num_threads()


def run(function, count):
    console = Console(file=io.StringIO(), width=100, force_terminal=True)
    result = run_jobs(function, [("bar", i, 1) for i in range(count)], processes=2, console=console)
    return result, console.file.getvalue()


def test_results_keep_the_order_of_the_jobs():
    results, text = run(square, 3)
    assert results == [0, 1, 4]
    assert "100 %" in text


def test_an_error_in_a_job_arrives_with_its_traceback():
    with pytest.raises(JobFailed, match=r"(?s)bar failed: ZeroDivisionError: job \d went wrong.*in fail"):
        run(fail, 2)


def test_a_process_that_dies_is_reported():
    with pytest.raises(JobFailed, match="ended abruptly"):
        run(die, 1)


def test_every_process_has_one_torch_thread(monkeypatch):
    for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    results, _ = run(threads, 1)
    assert results == [1]
