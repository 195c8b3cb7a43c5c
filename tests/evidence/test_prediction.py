"""Draws and predictions of the posterior against dense float64 algebra and against laplace-torch."""

import math

import pytest
import torch
from torch import nn
from torch.func import functional_call, jacrev

import shaver.curvature
from shaver.evidence import Posterior, prediction
from tests.evidence.evidence_cases import (
    KINDS,
    STRUCTURES,
    dense_posterior,
    make_curvature,
    make_theta,
    random_prior,
)


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_root_of_the_covariance_squares_to_the_inverse_of_the_dense_precision(kind, structure):
    posterior = Posterior(make_curvature(structure), random_prior(kind), make_theta(), temperature=0.3)
    for name, basis in posterior.bases().items():
        delta = posterior.delta_of(name)
        shape = posterior.theta[name].shape
        size = shape.numel()
        unit = torch.eye(size, dtype=torch.float64).reshape(size, *shape)
        root = basis.covariance_root(unit, basis.project(delta)).reshape(size, size)
        expected = torch.linalg.inv(dense_posterior(posterior.curvature.blocks[name], delta, 0.3))
        torch.testing.assert_close(root @ root.T, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_draws_have_the_posteriors_mean_and_covariance(structure):
    count = 4000
    posterior = Posterior(make_curvature(structure), random_prior("layer"), make_theta())
    for name, drawn in posterior.sample(count, seed=1).items():
        block = posterior.curvature.blocks[name]
        covariance = torch.linalg.inv(dense_posterior(block, posterior.delta_of(name)))
        spread = covariance.diagonal().sqrt()
        apart = (drawn.reshape(count, -1) - posterior.theta[name].flatten()) / spread
        assert apart.mean(0).abs().max() < 5 / math.sqrt(count)
        found, expected = apart.T @ apart / count, covariance / torch.outer(spread, spread)
        assert (found - expected).abs().max() < 6 * math.sqrt(2 / count)


def test_a_seed_gives_the_same_draws_and_the_users_random_numbers_stay():
    posterior = Posterior(make_curvature("kron"), 1.0, make_theta())
    state = torch.get_rng_state()
    one, same, other = posterior.sample(2, seed=3), posterior.sample(2, seed=3), posterior.sample(2, seed=4)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(one[name], same[name]) and not torch.equal(one[name], other[name]) for name in one)
    with pytest.raises(ValueError, match="number of samples must be 1 or more, not 0"):
        posterior.sample(0)


class Small(nn.Module):
    """A convolution, a norm with running statistics, dropout and a linear layer."""

    def __init__(self, outputs):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3)
        self.drop, self.out = nn.Dropout(0.5), nn.Linear(12, outputs)

    def forward(self, x):
        return self.out(self.drop(self.norm(self.conv(x)).tanh().flatten(1)))


def problem(likelihood, structure, kind="unit"):
    model = Small(3).double()
    with torch.no_grad():
        model.norm.running_mean.normal_()
        model.norm.running_var.uniform_(0.5, 2)
    x = torch.randn(24, 1, 4, 4, dtype=torch.float64)
    y = torch.randint(0, 3, (24,)) if likelihood == "classification" else torch.randn(24, 3, dtype=torch.float64)
    curvature = shaver.curvature.estimate(model, [(x, y)], likelihood=likelihood, structure=structure, source="ggn")
    prior = shaver.priors.make_prior(kind, dict(model.named_parameters()))
    for factor in prior.factors:
        factor.values = torch.rand_like(factor.values) + 0.5
    return model, x[:7], Posterior(curvature, prior, model, likelihood=likelihood)


def dense_covariance(model, x, posterior):
    """J Σ Jᵀ with the whole Jacobian and the whole Σ."""
    model.eval()
    theta = {name: p.detach() for name, p in model.named_parameters()}
    jacobian = jacrev(lambda weights: functional_call(model, weights, (x,)))(theta)
    model.train()
    total = 0
    for name, rows in jacobian.items():
        precision = dense_posterior(posterior.curvature.blocks[name], posterior.delta_of(name))
        flat = rows.flatten(2)
        total = total + flat @ torch.linalg.inv(precision) @ flat.mT
    return total


@pytest.mark.parametrize("limit", [2**26, 60], ids=["at once", "in pieces"])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_the_linearised_prediction_is_that_of_the_whole_jacobian(likelihood, structure, limit, monkeypatch):
    monkeypatch.setattr(prediction, "JACOBIAN_LIMIT", limit)
    model, x, posterior = problem(likelihood, structure)
    found = posterior.predict(x)
    expected = dense_covariance(model, x, posterior)
    torch.testing.assert_close(found.covariance, expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(found.variance, expected.diagonal(dim1=1, dim2=2), rtol=1e-9, atol=1e-12)
    with torch.no_grad():
        outputs = model.eval()(x)
    torch.testing.assert_close(found.outputs, outputs)
    if likelihood == "regression":
        torch.testing.assert_close(found.mean, outputs)
    else:
        scaled = outputs / (1 + math.pi / 8 * found.variance).sqrt()
        torch.testing.assert_close(found.mean, scaled.softmax(1))


@pytest.mark.parametrize("structure", STRUCTURES)
def test_the_sampled_prediction_averages_the_drawn_networks(structure):
    model, x, posterior = problem("classification", structure)
    found = posterior.predict(x, method="sampled", samples=9, seed=5)
    drawn = posterior.sample(9, seed=5)
    model.eval()
    with torch.no_grad():
        outputs = torch.stack(
            [functional_call(model, {name: w[i] for name, w in drawn.items()}, (x,)) for i in range(9)]
        )
    torch.testing.assert_close(found.mean, outputs.softmax(2).mean(0))
    torch.testing.assert_close(found.outputs, outputs.mean(0))
    torch.testing.assert_close(found.variance, outputs.var(0))


def test_sampling_a_linear_network_agrees_with_the_linearised_prediction():
    """There the expansion is exact, so that both are one Gaussian."""
    model, x = nn.Linear(5, 2).double(), torch.randn(30, 5, dtype=torch.float64)
    y = torch.randn(30, 2, dtype=torch.float64)
    curvature = shaver.curvature.estimate(model, [(x, y)], likelihood="regression", structure="kron", source="ggn")
    posterior = Posterior(curvature, 0.7, model, likelihood="regression")
    count = 3000
    exact, drawn = posterior.predict(x), posterior.predict(x, method="sampled", samples=count)
    assert ((drawn.outputs - exact.outputs).abs() < 5 * (exact.variance / count).sqrt()).all()
    assert ((drawn.variance / exact.variance - 1).abs() < 6 * math.sqrt(2 / count)).all()


def test_the_model_is_left_as_found_and_a_loaded_posterior_asks_for_it(tmp_path):
    model, x, posterior = problem("classification", "diag")
    model.norm.eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    expected = posterior.predict(x).mean
    posterior.predict(x, method="sampled", samples=2)
    assert model.training
    assert not model.norm.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    posterior.save(tmp_path / "posterior")
    loaded = Posterior.load(tmp_path / "posterior")
    with pytest.raises(ValueError, match=r"has no network: call posterior\.predict\(x, model=model\)"):
        loaded.predict(x)
    torch.testing.assert_close(loaded.predict(x, model=model).mean, expected)
    with pytest.raises(ValueError, match=r"'sample'.*did you mean 'sampled'"):
        posterior.predict(x, method="sample")


def test_a_network_that_takes_names_and_returns_logits():
    class Named(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(4, 3)

        def forward(self, words, weight):
            return {"logits": self.layer(words) * weight}

    model, x = Named(), {"words": torch.randn(6, 4), "weight": torch.rand(6, 1)}
    curvature = shaver.curvature.estimate(model, [x | {"labels": torch.randint(0, 3, (6,))}])
    found = Posterior(curvature, 1.0, model).predict(x)
    assert found.mean.shape == (6, 3)
    assert (found.variance > 0).all()


def test_it_says_what_it_is():
    posterior = Posterior(make_curvature("kron"), dict.fromkeys(make_theta(), 0.5), make_theta(), temperature=0.5)
    weights = sum(theta.numel() for theta in make_theta().values())
    said = repr(posterior)
    assert f"Posterior of {weights} weights in {len(posterior.theta)} parameters" in said
    assert "kron, ggn, 50 samples, temperature 0.5" in said
    assert "0.5 to 0.5" in said
    assert f"{100 * posterior.relevance():.2f}% of the weights" in said


laplace_structures = pytest.mark.parametrize("structure", ["diag", "kron"])


@laplace_structures
def test_class_probabilities_are_laplace_torchs(structure):
    peers = pytest.importorskip("tests.evidence.test_evidence_laplace")
    model, _, fitted = peers.peer("classification", structure, torch.tensor(0.37, dtype=torch.float64))
    x = torch.randn(11, 5, dtype=torch.float64)
    posterior = Posterior(peers.borrowed(model, fitted), 0.37, model)
    found = posterior.predict(x)
    torch.testing.assert_close(found.mean, fitted(x, pred_type="glm", link_approx="probit"), rtol=1e-5, atol=1e-7)


@laplace_structures
def test_a_regressions_mean_and_covariance_are_laplace_torchs(structure):
    peers = pytest.importorskip("tests.evidence.test_evidence_laplace")
    model, loader, fitted = peers.peer("regression", structure, torch.tensor(0.37, dtype=torch.float64))
    x = torch.randn(11, 4, dtype=torch.float64)
    curvature = shaver.curvature.estimate(model, loader, likelihood="regression", structure=structure, source="ggn")
    found = Posterior(curvature, 0.37, model, likelihood="regression").predict(x)
    mean, covariance = fitted(x, pred_type="glm")
    torch.testing.assert_close(found.mean, mean)
    torch.testing.assert_close(found.covariance, covariance, rtol=1e-5, atol=1e-8)
