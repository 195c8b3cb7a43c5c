"""What SpaM learns where the truth is known: which inputs matter, and how large the noise is."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.curvature import estimate
from shaver.evidence import Posterior
from shaver.likelihoods import Regression
from shaver.settings import FINE_TUNING, LOG_BOUNDS
from shaver.spam import SpaM
from tests.spam.toys import assert_close, blobs, mlp, seeded, sgd, split, train, weights

UPPER = math.exp(LOG_BOUNDS[1])
OFTEN: dict[str, Any] = {"every": 1, "decay": 0.9, "update": 10, "burn_in": 0.0}


def logistic(samples: int = 600, inputs: int = 33, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Three classes drawn from a linear model of inputs of which only the first three have a say."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, inputs, generator=generator, dtype=torch.float64)
    truth = torch.zeros(3, inputs, dtype=torch.float64)
    truth[:, :3] = 2.5 * torch.eye(3)
    y = torch.multinomial((x @ truth.T).softmax(1), 1, generator=generator).squeeze(1)
    return x, y


def linear(noise: float, samples: int = 400, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Two outputs of six inputs, of which the last four have no say."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    truth = torch.tensor([[1.0, -2.0], [1.5, 0.7]], dtype=torch.float64)
    return x, x[:, :2] @ truth.T + noise**0.5 * torch.randn(samples, 2, generator=generator, dtype=torch.float64)


def noise_of(x: Tensor, y: Tensor) -> float:
    """The unbiased estimate of σ² from the least-squares solution: what this draw says, whatever the truth is."""
    inputs = torch.cat([x, torch.ones(len(x), 1, dtype=x.dtype)], 1)
    squares = (inputs @ torch.linalg.lstsq(inputs, y).solution - y).square().sum()
    return float(squares) / (y.numel() - inputs.shape[1] * y.shape[1])


@pytest.mark.parametrize("source", ["ef", "mc"])
@pytest.mark.parametrize(
    "make",
    [lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), lambda p: torch.optim.Adam(p, lr=0.02)],
    ids=["sgd", "adam"],
)
def test_inputs_without_a_say_get_the_highest_precision(make: Any, source: str):
    x, y = logistic()
    model = seeded(lambda: nn.Linear(33, 3))
    total = 40 * 10
    spam = SpaM(model, 600, source=source, total_steps=total, debias=False, **OFTEN)
    optimizer = make(model.parameters())
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    for _ in range(40):
        for batch in split((x, y), 60):
            train(model, spam, optimizer, [batch])
            cosine.step()
    delta, theta = spam.prior.delta()["weight"], model.weight.detach()
    own = delta[:, :3].diagonal()
    assert (own < 2).all(), "what decides a class is free"
    idle = delta[:, 3:]
    assert idle.min() > own.max()
    # The evidence removes an idle weight whose estimate lies within about one standard error of zero: 57 % on average
    # over eight draws, 49 to 63 % in each.
    assert (idle >= 0.99 * UPPER).double().mean() > 0.35, "many of the rest are at the bound"
    assert (theta[:, 3:] == 0).double().mean() > 0.35, "and exactly zero"
    assert theta[:, 3:].abs().max() < 0.4 * theta[:, :3].diagonal().abs().min()
    assert 3 <= spam.statistics()["relevant"] * 102 <= 40  # of 99 weights and 3 biases
    assert F.cross_entropy(model(x), y) < 0.75


def test_a_regression_finds_its_inputs_and_its_noise():
    x, y = linear(noise=0.09)
    model = seeded(lambda: nn.Linear(6, 2))
    total = 60 * 8
    spam = SpaM(model, 400, likelihood="regression", total_steps=total, **OFTEN)
    optimizer = sgd(model, 0.01)
    for _ in range(60):
        for a, b in split((x, y), 50):
            optimizer.zero_grad()
            spam.loss(model(a), b).backward()
            spam.step(optimizer)
    assert isinstance(spam.likelihood, Regression)
    assert spam.likelihood.noise == pytest.approx(noise_of(x, y), rel=0.1)
    assert spam.statistics()["noise"] == spam.likelihood.noise
    delta = spam.prior.delta()["weight"]
    assert (delta[:, :2] < 10).all()
    assert (delta[:, 2:] > 1e3).double().mean() > 0.7
    torch.testing.assert_close(
        model.weight.detach()[:, :2], torch.tensor([[1.0, -2.0], [1.5, 0.7]]).double(), rtol=0.0, atol=0.06
    )


@pytest.mark.parametrize("start", [100.0, 1.0, 1e-3])
def test_the_noise_settles_wherever_it_starts(start: float):
    """The likelihood's average is restated whenever the noise changes: old and new nats are not mixed."""
    x, y = linear(noise=0.25)
    model = seeded(lambda: nn.Linear(6, 2))
    with torch.no_grad():  # at the least-squares solution, with a learning rate of 0
        solution = torch.linalg.lstsq(torch.cat([x, torch.ones(400, 1).double()], 1), y).solution
        model.weight.copy_(solution[:6].T)
        model.bias.copy_(solution[6])
    rss = float((model(x) - y).detach().square().sum())
    likelihood = Regression(noise=start)
    spam = SpaM(model, 400, likelihood=likelihood, source="mc", every=1, decay=0.9, update=1, shrink=0.0, burn_in=0)
    optimizer = sgd(model, 0.0)
    for step in range(20):
        before = likelihood.noise
        optimizer.zero_grad()
        spam.loss(model(x), y).backward()
        spam.step(optimizer)
        # σ² = RSS/(N·D − γ) with 0 ≤ γ ≤ 14 parameters, at every single update
        assert rss / 800 <= likelihood.noise <= rss / (800 - 14) * (1 + 1e-9), (step, before)
        gaussian = -0.5 * rss / likelihood.noise - 400 * math.log(2 * math.pi * likelihood.noise)
        assert spam.curvature.log_likelihood == pytest.approx(gaussian, rel=1e-9)
    exact = estimate(model, [(x, y)], likelihood).diagonal()
    for name, h in spam.curvature.diagonal().items():
        assert float(h.sum() / exact[name].sum()) == pytest.approx(1, abs=0.1), "H is under the new noise too"


def test_a_regression_with_a_loss_of_its_own_keeps_its_noise():
    """Nobody has told SpaM the likelihood, so there is nothing to learn the noise from."""
    x, y = linear(noise=0.25)
    model = seeded(lambda: nn.Linear(6, 2))
    spam = SpaM(model, 400, likelihood="regression", **OFTEN)
    optimizer = sgd(model, 0.01)
    for a, b in split((x, y), 50) * 3:
        optimizer.zero_grad()
        (0.5 * (model(a) - b).square().sum(1)).mean().backward()
        spam.step(optimizer)
    assert spam.updates == 2
    assert spam.statistics()["noise"] == 1
    assert "log_evidence" not in spam.statistics()


def test_a_lower_temperature_prunes_less():
    """Over-counted data know more weights."""
    found = []
    for temperature in (5.0, 1.0, 0.2):
        model = mlp()
        spam = SpaM(model, 96, temperature=temperature, source="ef", **OFTEN)
        train(model, spam, sgd(model, 0.05), split(blobs()), 15)
        found.append(spam.statistics()["effective_parameters"])
    assert found[0] < found[1] < found[2]


@pytest.mark.parametrize(
    ("samples", "options", "expected"),
    [
        (1, {}, 0.004096),
        (5, {}, 0.512),
        (7, {}, 1.0),
        (400, {}, 1.0),
        (25, {"debias": False}, 0.5),
        (25, {"freeze": 1.0}, 0.5),
        (25, {"total_steps": None}, 0.5),
        (400, {"debias": False}, 1.0),
        (5, {"temperature": 0.7}, 0.7),
        (5, {"prior": "unit"}, 1.0),
        (5, {"prior": "layer"}, 1.0),
        (5, {"likelihood": "regression"}, 1.0),
        (5, {"settings": FINE_TUNING}, 1.0),
        (5, {"structure": "kron"}, 1.0),
    ],
)
def test_the_data_count_more_where_each_of_many_weights_has_its_own_delta(
    samples: int, options: dict[str, Any], expected: float
):
    model = nn.Sequential(nn.Linear(20, 5, bias=False), nn.Linear(5, 3).requires_grad_(False))  # 100 weights train
    assert SpaM(model, samples, **({"total_steps": 1000} | options)).temperature == pytest.approx(expected)


def test_the_default_temperature_trains_as_the_same_number_passed():
    found = []
    for temperature in (None, math.sqrt(4 / 83)):
        model = mlp()  # 83 weights
        spam = SpaM(model, 4, temperature=temperature, source="ef", **OFTEN)
        train(model, spam, sgd(model, 0.05), split(blobs(4)), 15)
        assert spam.updates
        found.append(weights(model))
    assert_close(found[0], found[1])


def test_the_noise_and_delta_are_a_fixed_point_by_epochs_too():
    """By epochs with exact curvature on a linear model: δ and σ² that another update leaves alone."""
    x, y = linear(noise=0.25)
    model = seeded(lambda: nn.Linear(6, 2))
    spam = SpaM(model, 400, likelihood="regression", online=False, source="ggn", burn_in=0)
    optimizer = sgd(model, 0.02)
    for _ in range(12):
        for a, b in split((x, y), 50) * 5:
            optimizer.zero_grad()
            spam.loss(model(a), b).backward()
            spam.step(optimizer)
        spam.end_epoch([(x, y)])
    assert isinstance(spam.likelihood, Regression)
    assert spam.likelihood.noise == pytest.approx(noise_of(x, y), rel=0.03)
    delta, noise, at = spam.prior.delta(), spam.likelihood.noise, weights(model)
    spam.settings = type(spam.settings)(**(vars(spam.settings) | {"shrink": 0.0}))
    spam.update([(x, y)])
    assert spam.likelihood.noise == pytest.approx(noise, rel=1e-3)
    relevant = {name: at[name].abs() > 0.3 for name in at}
    assert_close(
        {name: d[relevant[name]] for name, d in spam.prior.delta().items() if relevant[name].any()},
        {name: d[relevant[name]] for name, d in delta.items() if relevant[name].any()},
        0.01,
    )
    assert isinstance(spam.posterior, Posterior)
