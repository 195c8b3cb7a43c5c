"""L1 training minimises the mean loss plus λ‖θ‖₁, whatever the optimizer, and makes exact zeros."""

import pytest
import torch
from torch import nn

from shaver.stepping import effective_step
from shaver.training import Options, fit, search_l1
from tests.training.problems import batches, network


def lasso_data():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(200, 6, generator=generator)
    x[:, 3] = x[:, 0] + 0.5 * x[:, 3]  # correlated, so the solution is not a coordinate-wise threshold
    y = x @ torch.tensor([1.0, -0.5, 0.02, 0.0, 0.3, 0.0]).unsqueeze(1)
    return x, y + 0.1 * torch.randn(200, 1, generator=generator)


def optimality(x, y, weight, strength):
    """How far the lasso's KKT conditions are from holding: |∇| = λ where w ≠ 0, |∇| ≤ λ where w = 0."""
    gradient = (x.T @ (x @ weight.T - y) / len(x)).flatten()
    w = weight.flatten()
    active = (gradient + strength * w.sign()).abs()[w != 0]
    return float(active.max()), float((gradient.abs()[w == 0] - strength).max()) if (w == 0).any() else -1.0


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_the_proximal_step_solves_the_lasso(optimizer):
    x, y = lasso_data()
    model = nn.Linear(6, 1, bias=False)
    lr = 0.01 if optimizer == "sgd" else 0.05
    fit(model, [(x, y)], method="l1", l1=0.1, epochs=1500, optimizer=optimizer, lr=lr, likelihood="regression")
    active, inactive = optimality(x, y, model.weight.detach(), 0.1)
    assert active < 2e-3
    assert inactive < 2e-3
    assert int((model.weight == 0).sum()) >= 2


def test_a_stronger_penalty_gives_more_zeros_and_spares_biases():
    zeros = []
    for strength in (1e-4, 1e-2, 1e-1):
        model = network()
        history = fit(model, batches(), method="l1", l1=strength, epochs=20, lr=0.1)
        zeros.append(int(sum((p == 0).sum() for p in model.parameters() if p.ndim >= 2)))
        assert not any((p == 0).any() for n, p in model.named_parameters() if p.ndim == 1 and n != "0.bias")
        penalty = strength * sum(float(p.detach().abs().sum()) for p in model.parameters() if p.ndim >= 2)
        assert history[-1]["penalty"] == pytest.approx(penalty, rel=1e-5)
    assert zeros == sorted(zeros)
    assert zeros[0] < zeros[1] < zeros[2]


def test_the_effective_step_is_where_a_constant_gradient_takes_the_weights():
    cases = {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "nesterov": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, nesterov=True),
        "dampened": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=0.5),
        "adam": lambda p: torch.optim.Adam(p, lr=0.01),
        "amsgrad": lambda p: torch.optim.Adam(p, lr=0.01, amsgrad=True),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.0),
    }
    for name, make in cases.items():
        parameter = nn.Parameter(torch.zeros(3, dtype=torch.float64))
        gradient = torch.tensor([0.5, -1.0, 2.0], dtype=torch.float64)
        optimizer = make([parameter])
        for _ in range(500):
            parameter.grad = gradient.clone()
            before = parameter.detach().clone()
            optimizer.step()
        moved = before - parameter.detach()
        predicted = effective_step(optimizer, optimizer.param_groups[0], parameter) * gradient
        assert torch.allclose(moved, predicted, rtol=1e-6), name


def test_the_search_takes_the_strongest_penalty_that_costs_nothing(tmp_path):
    found = search_l1(
        network, batches(), batches(seed=2), coefficients=(0.5, 1e-4, 1e-2), tolerance=0.03, epochs=15, lr=0.1,
        folder=tmp_path,
    )  # fmt: skip
    assert [row["l1"] for row in found.rows] == [1e-4, 1e-2, 0.5]
    best = max(row["valid_accuracy"] for row in found.rows)
    fine = [row["l1"] for row in found.rows if row["valid_accuracy"] >= best - 0.03]
    assert found.coefficient == max(fine)
    assert found.coefficient < 0.5, "a penalty that erases the network must not be chosen"
    assert found.rows[-1]["zeros"] > found.rows[0]["zeros"]
    assert (tmp_path / "l1_0.01" / "history.csv").exists()
    chosen = next(row for row in found.rows if row["l1"] == found.coefficient)
    assert found.history[-1]["valid_accuracy"] == chosen["valid_accuracy"]


def test_the_search_refuses_what_it_sets_itself():
    with pytest.raises(ValueError, match="sets method itself"):
        search_l1(network, batches(), batches(), method="map")
    with pytest.raises(ValueError, match="validation data"):
        search_l1(network, batches(), None)


def test_early_stopping_needs_the_evidence():
    with pytest.raises(ValueError, match='method="spam"'):
        fit(network(), batches(), method="l1", options=Options(early_stopping=2))
