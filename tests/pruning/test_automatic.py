"""Automatic sparsity against the exact evidence of a linear Gaussian model.

With an orthogonal design the Hessian is diagonal and the Laplace approximation exact, so that the gain of a weight is
the difference of two exact log marginal likelihoods: of the model with its column and of the model without.
"""

import copy
import math

import pytest
import torch
from torch import nn

from shaver.criteria import score
from shaver.curvature import estimate
from shaver.evidence import Posterior
from shaver.likelihoods import Regression
from shaver.pruning import DEFAULT_BUDGET, DEFAULT_NATS, prune
from shaver.pruning.automatic import PER_SAMPLE, weigh

N, D, NOISE = 40, 6, 0.3


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    X = torch.linalg.qr(torch.randn(N, D, generator=generator, dtype=torch.float64)).Q * math.sqrt(N) * 0.5
    truth = torch.tensor([2.0, -1.0, 0.3, 0.0, 0.05, 0.0], dtype=torch.float64)
    y = X @ truth + math.sqrt(NOISE) * torch.randn(N, generator=generator, dtype=torch.float64)
    delta = torch.tensor([0.2, 1.0, 5.0, 2.0, 30.0, 0.01], dtype=torch.float64)
    model = nn.Linear(D, 1, bias=False).double()
    mode = torch.linalg.solve(X.T @ X / NOISE + torch.diag(delta), X.T @ y / NOISE)
    with torch.no_grad():
        model.weight.copy_(mode[None])
    curvature = estimate(model, [(X, y[:, None])], likelihood=Regression(NOISE))
    return X, y, delta, model, Posterior(curvature, {"weight": delta[None]}, dict(model.named_parameters()))


def log_evidence(X, y, delta):
    """log N(y; 0, σ²I + X δ⁻¹ Xᵀ), dense."""
    covariance = NOISE * torch.eye(N, dtype=torch.float64) + X @ torch.diag(1 / delta) @ X.T
    return torch.distributions.MultivariateNormal(torch.zeros(N, dtype=torch.float64), covariance).log_prob(y)


def test_the_gain_is_the_exact_change_of_evidence_without_the_weight(problem):
    X, y, delta, model, posterior = problem
    whole = log_evidence(X, y, delta)
    rest = [[q for q in range(D) if q != p] for p in range(D)]
    exact = torch.stack([whole - log_evidence(X[:, r], y, delta[r]) for r in rest])
    gain = weigh(model, posterior, ["weight"]).gains["weight"][0]
    torch.testing.assert_close(gain, exact, rtol=1e-9, atol=1e-9)
    assert gain.min() < 0 < DEFAULT_NATS < gain.max()


def test_the_gain_is_the_savage_dickey_ratio_of_a_dense_posterior(problem):
    X, _, delta, model, posterior = problem
    covariance = torch.linalg.inv(X.T @ X / NOISE + torch.diag(delta))
    at_zero = torch.distributions.Normal(model.weight[0].detach(), covariance.diagonal().sqrt()).log_prob(delta * 0)
    prior = torch.distributions.Normal(delta * 0, delta**-0.5).log_prob(delta * 0)
    torch.testing.assert_close(weigh(model, posterior, ["weight"]).gains["weight"][0], prior - at_zero)


def test_auto_removes_what_does_not_pay_and_reports_exactly_what_that_does(problem):
    X, y, delta, model, posterior = problem
    gain = weigh(model, posterior, ["weight"]).gains["weight"][0]
    theta = model.weight[0].detach().clone()
    pruned = prune(model, None, "auto", posterior=posterior, budget=math.inf)
    kept = pruned.masks["weight"][0]
    assert torch.equal(kept, gain >= DEFAULT_NATS)
    assert 0 < int(kept.sum()) < D
    assert torch.equal(model.weight[0] == 0, ~kept)
    exact = log_evidence(X[:, kept], y, delta[kept]) - log_evidence(X, y, delta)
    assert pruned.evidence_change == pytest.approx(float(exact))

    def loss(w):
        return float((y - X @ w).square().sum() / (2 * NOISE))

    assert pruned.loss_rise == pytest.approx(loss(theta * kept) - loss(theta))
    assert pruned.requested == "auto"
    assert "nats" in str(pruned)


def test_the_expected_loss_counts_each_sample_once_at_every_temperature(problem):
    _, _, delta, model, posterior = problem
    theta = model.weight.detach().clone()
    masks = torch.rand(theta.shape, generator=torch.Generator().manual_seed(0)) < 0.5
    cold = Posterior(posterior.curvature, delta, {"weight": theta}, temperature=0.25)
    for of in (posterior, cold):
        h = posterior.curvature.diagonal()["weight"]
        # θ is the mode under δ and the temperature: the loss has the slope −Tδθ there
        expected = ((of.temperature * delta * theta.square() + 0.5 * h * theta.square()) * ~masks).sum()
        found = weigh(model, of, ["weight"]).of_removal({"weight": masks})["loss_rise"]
        assert found == pytest.approx(float(expected))


def test_the_threshold_is_an_option(problem):
    *_, model, posterior = problem
    assert prune(model, None, "auto", posterior=posterior, nats=-1e9, budget=math.inf).achieved == 0
    assert prune(model, None, "auto", posterior=posterior, nats=1e9, budget=math.inf).achieved == 1
    with pytest.raises(ValueError, match="finite number"):
        prune(model, None, "auto", posterior=posterior, nats=float("nan"))


def test_the_budget_is_spent_on_the_cheapest_weights_first_and_never_exceeded(problem):
    X, _, delta, model, posterior = problem
    theta = model.weight[0].detach().clone()
    h = (X.T @ X / NOISE).diagonal()
    rise = delta * theta**2 + 0.5 * h * theta**2
    half_gamma = 0.5 * float((h / (h + delta)).sum())
    cheapest = rise.sort()
    for count in range(1, 5):
        between = float(cheapest.values[: count + 1].sum() + cheapest.values[:count].sum()) / 2
        with torch.no_grad():
            model.weight.copy_(theta[None])
        pruned = prune(model, None, "auto", posterior=posterior, nats=1e9, budget=between / half_gamma)
        removed = (~pruned.masks["weight"][0]).nonzero().flatten().tolist()
        assert removed == sorted(cheapest.indices[:count].tolist())
        assert pruned.loss_rise == pytest.approx(float(cheapest.values[:count].sum()))
    with pytest.raises(ValueError, match=r"budget, a share .* not -1"):
        prune(model, None, "auto", posterior=posterior, budget=-1)


def test_the_default_threshold_is_s_equal_one_at_the_optimal_prior():
    """At δ* with S = h/δ = 1 the gain is ½(1 − log 2)."""
    h = 3.0
    model = nn.Linear(1, 1, bias=False).double()
    nn.init.constant_(model.weight, math.sqrt(1 / (h + h)))
    x = torch.tensor([[math.sqrt(h)]], dtype=torch.float64)
    curvature = estimate(model, [(x, x)], likelihood=Regression(1.0))
    posterior = Posterior(curvature, h, dict(model.named_parameters()))
    torch.testing.assert_close(
        weigh(model, posterior, ["weight"]).gains["weight"], torch.full((1, 1), DEFAULT_NATS, dtype=torch.float64)
    )


def test_limits_keep_the_best_of_each_layer(problem):
    *_, model, posterior = problem
    gain = weigh(model, posterior, ["weight"]).gains["weight"][0]
    pruned = prune(model, None, "auto", posterior=posterior, nats=1e9, budget=math.inf, minimum=2)
    assert torch.equal(pruned.masks["weight"][0].nonzero().flatten(), gain.topk(2).indices.sort().values)


def test_scores_say_which_parameters_and_a_posterior_adds_to_any_report(problem):
    *_, model, posterior = problem
    gain = weigh(model, posterior, ["weight"]).gains["weight"][0]
    pruned = prune(model, score(model, "opd", posterior=posterior), 0.5, posterior=posterior)
    assert pruned.evidence_change == pytest.approx(-float(gain[~pruned.masks["weight"][0]].sum()))


def test_another_scope_or_an_improper_prior_is_refused(problem):
    *_, model, posterior = problem
    with pytest.raises(ValueError, match="judges each weight by itself"):
        prune(model, None, "auto", posterior=posterior, scope="layer")
    posterior.delta = lambda: {"weight": torch.zeros(1)}
    with pytest.raises(ValueError, match="'weight' is not positive"):
        prune(model, None, "auto", posterior=posterior)


def test_no_sample_may_lose_more_than_a_little():
    """Many weights that nobody learned a δ for: the share of ½Σγ would allow more than the samples do."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(N, 4 * N, generator=generator, dtype=torch.float64)
    model = nn.Linear(4 * N, 1, bias=False).double()
    with torch.no_grad():
        model.weight.copy_(0.02 * torch.randn(1, 4 * N, generator=generator, dtype=torch.float64))
    posterior = Posterior(
        estimate(model, [(x, model(x).detach())], likelihood=Regression(NOISE)), {"weight": 1e-9}, model
    )
    rises = [
        prune(copy.deepcopy(model), None, "auto", posterior=posterior, nats=1e9, budget=budget).loss_rise
        for budget in (None, DEFAULT_BUDGET)
    ]
    assert rises[0] is not None
    assert rises[1] is not None
    assert 0.9 * PER_SAMPLE * N < rises[0] <= PER_SAMPLE * N < rises[1]


def test_a_layer_that_is_gone_is_warned_of(problem):
    *_, model, posterior = problem
    with pytest.warns(UserWarning, match="removes all of weight"):
        prune(copy.deepcopy(model), None, "auto", posterior=posterior, budget=math.inf, nats=1e9)


def test_auto_with_a_prior_that_was_never_learned_is_refused(problem, tmp_path):
    *_, model, learned = problem
    fixed = Posterior(learned.curvature, 2.0, model)
    fixed.save(tmp_path / "posterior")
    before = model.weight.detach().clone()
    for posterior in (fixed, Posterior.load(tmp_path / "posterior")):
        with pytest.raises(ValueError, match="one δ that was given as a number"):
            prune(model, None, "auto", posterior=posterior)
    assert torch.equal(model.weight, before)
    assert prune(model, score(model, "opd", posterior=fixed), 0.5, posterior=fixed).loss_rise is not None
    learned.save(tmp_path / "posterior")
    assert not Posterior.load(tmp_path / "posterior").fixed
