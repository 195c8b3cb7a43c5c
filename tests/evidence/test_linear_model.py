"""Linear regression, where the Laplace evidence is exact: the known optimum of prior and noise is found."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize
from scipy.stats import multivariate_normal

from shaver.curvature.blocks import Curvature, DiagonalBlock, KroneckerBlock
from shaver.evidence import Posterior, improve, improve_noise
from shaver.likelihoods import Regression
from shaver.priors import make_prior

N, INPUTS = 60, 8


def data(orthogonal):
    """Three of eight inputs matter; the others carry next to nothing of y."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(N, INPUTS, generator=generator, dtype=torch.float64)
    noise = 0.5 * torch.randn(N, generator=generator, dtype=torch.float64)
    weights = torch.tensor([1.5, -0.7, 0.3, 0.02, -0.01, 0, 0.01, -0.02], dtype=torch.float64)
    if orthogonal:  # with lengths of their own, or the eigenbasis of X'X would be any
        x = torch.linalg.qr(x).Q
        noise = noise - x @ (x.T @ noise)
        x = x * math.sqrt(N) * torch.linspace(0.8, 1.2, INPUTS, dtype=torch.float64)
    else:
        x = x + 0.6 * x[:, :1]
    return x, x @ weights + noise


def exact(x, y, delta, noise):
    """log N(y; 0, X δ⁻¹ Xᵀ + σ² I), by scipy."""
    covariance = x.numpy() @ np.diag(1 / np.asarray(delta)) @ x.numpy().T + noise * np.eye(len(y))
    return float(multivariate_normal.logpdf(y.numpy(), np.zeros(len(y)), covariance))


def kronecker(x, noise):
    """X'X/σ² as A ⊗ G."""
    gradient = torch.full((1, 1, 1), N / noise, dtype=torch.float64)
    return KroneckerBlock((x.T @ x / N)[None], gradient, torch.Size([1, INPUTS]))


def at_the_mode(x, y, prior, likelihood, structure):
    """The mode of the weights for the present prior and noise, and the curvature there."""
    delta = prior.delta()["w"].expand(1, INPUTS)[0]
    gram = x.T @ x / likelihood.noise
    theta = torch.linalg.solve(gram + torch.diag(delta), x.T @ y / likelihood.noise)
    log_likelihood = -float(likelihood.nll((x @ theta)[:, None], y[:, None]).sum())
    block = kronecker(x, likelihood.noise) if structure == "kron" else DiagonalBlock(gram.diagonal().clone()[None])
    return {"w": theta[None]}, Curvature({"w": block}, log_likelihood, N, structure, "ggn")


def learn(x, y, kind, structure, method="fixed_point", rounds=200, noise=1.0, learn_noise=True):
    prior, likelihood = make_prior(kind, {"w": torch.zeros(1, INPUTS, dtype=torch.float64)}), Regression(noise)
    for _ in range(rounds):
        theta, curvature = at_the_mode(x, y, prior, likelihood, structure)
        posterior = improve(prior, curvature, theta, method=method, steps=1 if method == "fixed_point" else 100)
        if learn_noise:
            improve_noise(likelihood, curvature, posterior.effective_parameters)
    theta, curvature = at_the_mode(x, y, prior, likelihood, structure)
    return prior, likelihood, Posterior(curvature, prior, theta)


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("kind", ["scalar", "unit", "parameter"])
def test_the_laplace_evidence_of_an_orthogonal_design_is_exact(kind, structure):
    x, y = data(orthogonal=True)
    prior, likelihood, posterior = learn(x, y, kind, structure, rounds=3)
    delta = prior.delta()["w"].expand(1, INPUTS)[0]
    assert posterior.log_evidence == pytest.approx(exact(x, y, delta, likelihood.noise), rel=1e-9)


def test_scalar_prior_and_noise_reach_the_optimum_of_the_exact_evidence():
    x, y = data(orthogonal=False)
    prior, likelihood, posterior = learn(x, y, "scalar", "kron")
    best = minimize(
        lambda v: -exact(x, y, np.full(INPUTS, np.exp(v[0])), np.exp(v[1])),
        np.zeros(2),
        method="Nelder-Mead",
        options={"xatol": 1e-8, "fatol": 1e-10},
    )
    assert posterior.log_evidence == pytest.approx(-best.fun, abs=1e-7)
    assert math.log(float(prior.delta()["w"])) == pytest.approx(best.x[0], abs=1e-3)
    assert math.log(likelihood.noise) == pytest.approx(best.x[1], abs=1e-3)


@pytest.mark.parametrize("method", ["fixed_point", "gradient"])
@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_relevance_determination_finds_the_known_optimum_and_prunes_the_rest(structure, method):
    """With orthogonal inputs δ_j = s²/(q² − s) if q² > s and infinite if not; s = x'x/σ², q = x'y/σ²."""
    x, y = data(orthogonal=True)
    noise = 0.25
    prior, _, posterior = learn(
        x,
        y,
        "parameter",
        structure,
        method,
        rounds=100 if method == "fixed_point" else 20,
        noise=noise,
        learn_noise=False,
    )
    s, q = (x.square().sum(0) / noise), (x.T @ y / noise)
    relevant = q.square() > s
    assert relevant.tolist() == [True] * 3 + [False] * 5
    delta = prior.delta()["w"][0]
    tolerance = 1e-3 if method == "fixed_point" else 2e-2
    torch.testing.assert_close(delta[relevant], (s**2 / (q**2 - s))[relevant], rtol=tolerance, atol=0)
    assert (delta[~relevant] > 100 * delta[relevant].max()).all()
    if method == "fixed_point":
        assert (posterior.theta["w"][0][~relevant].abs() < 1e-6).all()
        assert posterior.relevance() == pytest.approx(float(relevant.double().mean()))


def test_noise_and_relevance_together_reach_the_brute_force_optimum():
    x, y = data(orthogonal=True)
    _, likelihood, posterior = learn(x, y, "parameter", "diag", rounds=400)
    bounds = [(-14, 27.6)] * INPUTS + [(-5, 5)]
    best = minimize(
        lambda v: -exact(x, y, np.exp(v[:-1]), np.exp(v[-1])),
        np.zeros(INPUTS + 1),
        method="L-BFGS-B",
        bounds=bounds,
        options={"maxiter": 1000, "ftol": 1e-14},
    )
    assert posterior.log_evidence == pytest.approx(-best.fun, abs=1e-3)
    assert likelihood.noise == pytest.approx(math.exp(best.x[-1]), rel=1e-2)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_the_noise_step_raises_the_evidence_and_keeps_curvature_and_likelihood_in_step(temperature):
    x, y = data(orthogonal=False)
    prior, likelihood = make_prior("scalar", {"w": torch.zeros(1, INPUTS, dtype=torch.float64)}), Regression(5.0)
    theta, curvature = at_the_mode(x, y, prior, likelihood, "kron")
    before = Posterior(curvature, prior, theta, temperature)
    first = before.log_evidence
    for _ in range(30):
        posterior = Posterior(curvature, prior, theta, temperature)
        improve_noise(likelihood, curvature, posterior.effective_parameters, temperature=temperature)
    after = Posterior(curvature, prior, theta, temperature).log_evidence
    assert after > first
    outputs = (x @ theta["w"][0])[:, None]
    assert curvature.log_likelihood == pytest.approx(-float(likelihood.nll(outputs, y[:, None]).sum()))
    torch.testing.assert_close(curvature.blocks["w"].G, kronecker(x, likelihood.noise).G)

    def evidence(noise):
        again = Regression(noise)
        block = kronecker(x, noise)
        likely = -float(again.nll(outputs, y[:, None]).sum())
        return Posterior(Curvature({"w": block}, likely, N, "kron", "ggn"), prior, theta, temperature).log_evidence

    assert after >= max(evidence(likelihood.noise * c) for c in (0.97, 0.99, 1.01, 1.03))


def test_noise_with_more_weights_known_than_data_stays_positive():
    likelihood = Regression(2.0)
    curvature = Curvature({"w": DiagonalBlock(torch.ones(3))}, -2 * math.log(4 * math.pi) / 2 - 0.5, 2, "diag", "ggn")
    assert improve_noise(likelihood, curvature, effective_parameters=2.5) == pytest.approx((2.0 + 2.0 * 2.5) / 2)


def test_a_likelihood_that_is_not_this_regressions_is_refused():
    curvature = Curvature({"w": DiagonalBlock(torch.ones(3))}, 10.0, 2, "diag", "ggn")
    with pytest.raises(FloatingPointError, match="squared residuals"):
        improve_noise(Regression(1.0), curvature, 1.0)
