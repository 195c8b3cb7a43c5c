"""What the tests of online curvature share: measured passes over the shared cases, and the numbers they must give."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shaver.batches import targets_of
from shaver.curvature import OnlineCurvature, estimate
from shaver.likelihoods import Classification, get_likelihood
from tests.curvature.cases import BY_NAME, CASES, Case
from tests.curvature.reference import assert_all_same

N = 50


def without_noise(model: nn.Module) -> nn.Module:
    """Training mode, but with no dropout: a measured pass and an estimate see the same network."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model.train()


def same_in_training(case: Case) -> bool:
    """No layer that uses the batch's own statistics in training."""
    tracked = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    return not any(isinstance(m, tracked) and m.track_running_stats for m in case.build().modules())


STEADY = [case for case in CASES if same_in_training(case)]
CLASSIFIERS = [case for case in STEADY if isinstance(get_likelihood(case.likelihood), Classification)]


def forward(case: Case, model: nn.Module, batch: Any) -> Tensor:
    outputs = case.reading["forward"](model, batch) if case.keys else model(batch[0])
    assert isinstance(outputs, Tensor)
    return outputs


def nlls(case: Case, model: nn.Module, batch: Any) -> Tensor:
    """The negative log likelihood of each sample, by a pass that is measured."""
    return get_likelihood(case.likelihood).nll(forward(case, model, batch), targets_of(batch))


def online_for(model: nn.Module, **options: Any) -> OnlineCurvature:
    return OnlineCurvature(model, **({"data_size": N, "source": "ef", "every": 1, "decay": 0.0} | options))


def expected(case: Case, model: nn.Module, batches: list[Any], source: str = "ef") -> tuple[dict[str, Tensor], float]:
    """N/B of an estimate over a step's batches, and its log likelihood."""
    found = estimate(model, batches, case.likelihood, source=source, **case.reading)
    scale = N / found.data_size
    return {name: scale * h for name, h in found.diagonal().items()}, scale * found.log_likelihood


def assert_step(online: OnlineCurvature, case: Case, batches: list[Any]) -> None:
    diagonal, log_likelihood = expected(case, online.model, batches)
    found = online.curvature()
    assert_all_same(found.diagonal(), diagonal)
    assert found.log_likelihood == pytest.approx(log_likelihood, rel=1e-10)
    assert (found.data_size, found.structure, found.source) == (N, "diag", "ef")


def prepare(name: str = "lenet", sizes: tuple[int, ...] = (5,)) -> tuple[Case, nn.Module, list[Any]]:
    case = BY_NAME[name]
    return case, without_noise(case.model()), case.batches(sizes)


#: Losses by each sample's negative log likelihood, and what they weigh with five samples.
LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "mean": (lambda nll: nll.mean(), 1.0),
    "sum": (lambda nll: nll.sum(), 5.0),
    "a part of the mean": (lambda nll: 0.37 * nll.mean(), 0.37),
    "scaled": (lambda nll: 1024 * nll.mean(), 1024.0),
}


def by_hand(case: Case, model: nn.Module, batch: Any, gradient: Tensor) -> dict[str, Tensor]:
    """Σ_n (J_nᵀ g_n)² by one backward pass a sample."""
    parameters = dict(model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for n in range(len(gradient)):
        outputs = forward(case, model, (batch[0][n : n + 1], batch[1][n : n + 1]))
        rows = torch.autograd.grad(outputs, list(parameters.values()), gradient[n : n + 1], allow_unused=True)
        for name, row in zip(parameters, rows, strict=True):
            total[name] += 0 if row is None else row.square()
    return total
