"""Latency: the measured time per call."""

import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

from shaver.measure.evaluating import evaluating
from shaver.measure.example import Example, call, resize
from shaver.naming import check_count, check_number

_WARM_UP = 3
_FEWEST = 3


@dataclass(frozen=True)
class Latency:
    """Wall time per call.

    Attributes:
        median: Median over the timed calls, in seconds.
        spread: Interquartile range over the timed calls, in seconds. Smaller differences mean nothing.
        repeats: Number of timed calls.
        batch_size: Samples per call.
    """

    median: float
    spread: float
    repeats: int
    batch_size: int


def latency(
    model: nn.Module, example: Example, *, batch_size: int = 1, repeats: int = 30, seconds: float = 3.0
) -> Latency:
    """Measure the time per call on one thread, in evaluation mode without gradients, after a warm-up.

    Example:
        >>> latency(model, x, batch_size=128)
        Latency(median=..., spread=..., repeats=..., batch_size=128)

    Args:
        model: The network; called up to three times for warm-up, then at most ``repeats`` times.
        example: Inputs of at least one sample, as for :func:`shaver.measure.flops`; samples are repeated to fill the
            batch.
        batch_size: Samples per call.
        repeats: Maximum number of timed calls; at least three.
        seconds: Time limit in seconds; at least three calls are timed in any case.

    Raises:
        ValueError: ``repeats`` is below three, or ``batch_size`` below one.
    """
    check_number("seconds", seconds, least=0)
    if check_count("repeats", repeats, 0) < _FEWEST:
        raise ValueError(f"repeats must be at least {_FEWEST} for a median and a spread, not {repeats!r}.")
    check_count("batch_size", batch_size)
    inputs = resize(example, batch_size)
    on_gpu = any(weight.is_cuda for weight in model.parameters())
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with evaluating(model):
            warm_up_end = time.perf_counter() + seconds / 3
            for _ in range(_WARM_UP):
                _timed(model, inputs, on_gpu)
                if time.perf_counter() > warm_up_end:
                    break
            times: list[float] = []
            end = time.perf_counter() + seconds
            while len(times) < repeats and (len(times) < _FEWEST or time.perf_counter() < end):
                times.append(_timed(model, inputs, on_gpu))
    finally:
        torch.set_num_threads(threads)
    lower, median, upper = statistics.quantiles(times, n=4, method="inclusive")
    return Latency(median=median, spread=upper - lower, repeats=len(times), batch_size=batch_size)


def _timed(model: nn.Module, inputs: Example, on_gpu: bool) -> float:
    if on_gpu:  # a GPU keeps working after the call returns
        torch.cuda.synchronize()
    start = time.perf_counter()
    call(model, inputs)
    if on_gpu:
        torch.cuda.synchronize()
    return time.perf_counter() - start
