"""Norm statistics: running mean and variance of BatchNorm, measured again on unlabelled batches."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shaver.batches import Forward, check_batches, check_values
from shaver.measure.evaluating import evaluating, restored
from shaver.naming import check_functions
from shaver.repairing.calibration import call
from shaver.repairing.sites import norms_of


def recalibrate(model: nn.Module, batches: Iterable[Any], *, forward: Forward | None = None) -> tuple[str, ...]:
    """Measure the running statistics of every BatchNorm again, as the plain average over these batches.

    After weights have changed, the statistics that BatchNorm gathered in training no longer fit. Use this after pruning
    without repair, or after averaging weights. No labels are needed; a few hundred samples are enough. Batches should
    hold 32 samples or more. A network without such layers is left alone.

    Example:
        >>> model = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
        >>> recalibrate(model, [torch.randn(64, 4)])
        ('1',)

    Args:
        model: Its BatchNorm buffers are changed in place; modes, momentum and random state are left as found. After an
            error or an interruption the buffers are as they were.
        batches: Tensors, tuples ``(inputs, …)`` or dicts.
        forward: ``forward(model, batch)`` for batches of another layout.

    Returns:
        The names of the layers that were measured.

    Raises:
        ValueError: There are no batches, or statistics are not finite.
    """
    norms = norms_of(check_values(model, "recalibrate"))
    check_batches(batches, "recalibrate")
    check_functions(forward=forward)
    if not norms:
        return ()
    empty = True
    with evaluating(model), torch.random.fork_rng(devices=[]), restored(norm_buffers(model)):
        momenta = {path: norm.momentum for path, norm in norms.items()}
        try:
            for norm in norms.values():
                norm.reset_running_stats()
                norm.momentum = None  # the plain average of all batches
                norm.training = True
            for batch in batches:
                empty = False
                call(model, batch, forward)
        finally:
            for path, norm in norms.items():
                norm.momentum = momenta[path]
        if empty:
            raise ValueError("there are no calibration batches: nothing to measure.")
        for path, norm in norms.items():
            set_statistics(path, norm, norm.running_mean, norm.running_var)
    return tuple(norms)


@torch.no_grad()
def set_statistics(path: str, norm: _BatchNorm, mean: Tensor | None, variance: Tensor | None) -> None:
    """Give a BatchNorm these running statistics, which must be finite."""
    assert norm.running_mean is not None
    assert norm.running_var is not None
    assert mean is not None
    assert variance is not None
    if not bool(mean.isfinite().all() & variance.isfinite().all()):
        raise ValueError(f"the inputs of {path!r} hold NaN or infinity: the data or the network are broken.")
    norm.running_mean.copy_(mean)
    norm.running_var.copy_(variance)


def norm_buffers(model: nn.Module) -> list[Tensor]:
    """The running statistics of every BatchNorm."""
    return [buffer for norm in norms_of(model).values() for buffer in norm.buffers(recurse=False)]
