"""δ for a network that was trained elsewhere: the evidence chooses it."""

import pytest
import torch
from torch import nn

import shaver
from shaver.evidence import fit_prior


@pytest.fixture(scope="module")
def trained():
    """A small classifier trained without weight decay, and its curvature."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    x = torch.randn(200, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    y = x[:, :3].argmax(1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, shaver.curvature.estimate(model, [(x, y)])


def test_no_other_scalar_has_more_evidence(trained):
    model, curvature = trained
    posterior = fit_prior(model, curvature, "scalar")
    others = [shaver.log_evidence(model, curvature, prior_precision=10.0**k) for k in torch.linspace(-3, 3, 40)]
    assert posterior.log_evidence >= max(others)
    assert posterior.log_evidence - max(others) < 1  # the grid comes near


def test_more_precisions_explain_the_data_better(trained):
    model, curvature = trained
    values = [fit_prior(model, curvature, kind).log_evidence for kind in ("scalar", "layer", "unit")]
    assert values == sorted(values)
    assert fit_prior(model, curvature).log_evidence == pytest.approx(values[1])


def test_frozen_parameters_are_left_out(trained):
    model, _ = trained
    model[0].bias.requires_grad_(False)
    x = torch.randn(50, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    try:
        posterior = fit_prior(model, shaver.curvature.estimate(model, [(x, x[:, :3].argmax(1))]))
    finally:
        model[0].bias.requires_grad_(True)
    assert "0.bias" not in posterior.theta
