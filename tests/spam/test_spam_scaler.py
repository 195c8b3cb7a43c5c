"""SpaM with a gradient scaler: a loss scale changes nothing, a skipped step is none."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from shaver.spam import SpaM
from tests.spam.toys import QUICK, N, assert_close, blobs, mlp, sgd, split, weights


class Problem:
    """Steps in float32, with or without a loss scale that grows on the way."""

    def __init__(self, scaled: bool, **options: Any) -> None:
        self.model = mlp().float()
        self.optimizer = sgd(self.model)
        self.spam = SpaM(self.model, N, **QUICK, **options)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2, enabled=scaled)

    def step(self, x: Tensor, y: Tensor, factor: float = 1.0) -> None:
        self.optimizer.zero_grad()
        loss = self.spam.loss(self.model(x.float()), y)
        self.scaler.scale(loss * factor).backward()
        self.spam.step(self.optimizer, scaler=self.scaler)
        self.scaler.update()


@pytest.mark.parametrize(
    "options",
    [{"source": "ef"}, {"source": "mc"}, {"source": "ef", "proximal": False}, {"source": "ef", "loss": "mean"}],
    ids=str,
)
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_a_loss_scale_changes_nothing(options: dict[str, Any], likelihood: str):
    plain, scaled = (Problem(on, likelihood=likelihood, **options) for on in (False, True))
    for x, y in split(blobs()) * 2:
        for problem in (plain, scaled):
            problem.step(x, x[:, :3].float() if likelihood == "regression" else y)
    assert scaled.scaler.get_scale() == 64 * 2**6
    assert scaled.spam.updates == plain.spam.updates == 4
    assert_close(weights(scaled.model), weights(plain.model), 1e-3)
    if likelihood == "regression":
        assert scaled.spam.statistics()["noise"] == pytest.approx(plain.spam.statistics()["noise"], rel=1e-3)


@pytest.mark.parametrize("source", ["ef", "mc"])
@pytest.mark.parametrize("proximal", [True, False])
def test_a_skipped_step_is_neither_a_step_nor_a_shrink_nor_a_measurement(source: str, proximal: bool):
    problem = Problem(True, source=source, proximal=proximal)
    batches = split(blobs())
    problem.step(*batches[0])
    problem.step(*batches[1])
    before, h = weights(problem.model), problem.spam.curvature.diagonal()
    problem.spam.timetable.update = 100  # no update of δ just now
    problem.step(*batches[2], factor=math.inf)  # the third step is one that is measured
    assert_close(weights(problem.model), before, 0.0)
    assert_close(problem.spam.curvature.diagonal(), h, 0.0)
    problem.step(*batches[3])
    assert any(not torch.equal(w, before[name]) for name, w in weights(problem.model).items())


def test_without_a_scaler_an_infinite_loss_is_an_error():
    problem = Problem(False)
    with pytest.raises(FloatingPointError, match="not finite at step 1"):
        problem.step(*blobs(), factor=math.inf)
