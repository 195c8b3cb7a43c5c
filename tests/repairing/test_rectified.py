"""The fit to what a ReLU lets through, and which layers have one behind them."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shaver.repairing.rectified import rectified_error, rectified_fit, rectified_variance
from shaver.repairing.sites import make_plan


def drawn(*shape, seed):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def problem(seed):
    x, dense = drawn(400, 6, seed=seed), drawn(5, 7, seed=seed + 100)
    rows = torch.cat([x, torch.ones(400, 1, dtype=torch.float64)], 1)
    return x, rows, dense, rows @ dense.T


@pytest.mark.parametrize("seed", range(3))
def test_the_error_behind_the_relu_is_below_that_of_least_squares(seed):
    x, rows, dense, y = problem(seed)
    kept = torch.ones_like(dense, dtype=torch.bool)
    kept[:, :3] = False
    start = torch.zeros_like(dense)
    start[:, 3:] = torch.linalg.lstsq(rows[:, 3:], y).solution.T
    pairs = [(x[:150], y[:150]), (x[150:], y[150:])]
    found = rectified_fit(pairs, rows.T @ rows, start, kept, dense, torch.full((1, 7), 1e-9, dtype=torch.float64))
    error = ((rows @ found.T).relu() - y.relu()).square().sum(0)
    torch.testing.assert_close(rectified_error(pairs, found), error)
    torch.testing.assert_close(rectified_variance(pairs), (y.relu() - y.relu().mean(0)).square().sum(0))
    before = ((rows @ start.T).relu() - y.relu()).square().sum(0)
    assert (error <= before).all()
    assert error.sum() < 0.95 * before.sum()
    assert (found[~kept] == 0).all()


def test_hidden_outputs_are_free():
    """An output that is never positive stays as it is: nothing of it is seen, whatever was removed."""
    x, rows, dense, _ = problem(7)
    dense[:, -1] = -100
    pairs = [(x, rows @ dense.T)]
    start = dense.clone()
    start[:, 0] = 0
    damping = torch.full((1, 7), 1e-9, dtype=torch.float64)
    found = rectified_fit(pairs, rows.T @ rows, start, start != 0, start, damping)
    torch.testing.assert_close(found, start)


class Forks(nn.Module):
    """Layers with a ReLU alone behind them, and layers with more."""

    def __init__(self):
        super().__init__()
        for name in ("module", "function", "method", "inplace", "skip", "normed", "returned", "tied", "last"):
            setattr(self, name, nn.Linear(4, 4))
        self.relu, self.norm = nn.ReLU(inplace=True), nn.BatchNorm1d(4)
        self.other = nn.Linear(4, 4)
        self.other.weight = self.tied.weight  # with a bias of its own

    def forward(self, x):
        x = self.relu(self.module(x))
        x = F.relu(self.function(x))
        y = self.method(x)
        x = y.relu() if y.shape[1] == 4 else y  # reading the shape is no use of the values
        x = self.inplace(x).relu_() + 1
        z = self.skip(x)
        x = F.relu(z) + z
        x = F.relu(self.norm(self.normed(x)))
        first = self.returned(x)
        x = F.relu(self.other(F.relu(self.tied(F.relu(first)))))
        return first, self.last(x)


def test_layers_with_nothing_but_a_relu_behind_them_are_found():
    model = Forks().eval()
    plan = make_plan(model, lambda: model(torch.randn(3, 4)), [])
    found = {path for (path, _), site in plan.by_user.items() if site.rectified}
    assert found == {"module", "function", "method", "inplace"}
