"""Every prior with every structure against the dense float64 evidence, its determinant, covariance and slope."""

import pytest
import torch

from shaver.curvature.blocks import Curvature, DiagonalBlock
from shaver.evidence import Posterior, improve
from tests.evidence.evidence_cases import (
    KINDS,
    STRUCTURES,
    by_hand,
    dense_evidence,
    dense_factors,
    dense_posterior,
    make_curvature,
    make_theta,
    random_prior,
)

COMBINATIONS = [(kind, structure) for kind in KINDS for structure in STRUCTURES]


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(
        torch.as_tensor(actual, dtype=torch.float64),
        torch.as_tensor(expected, dtype=torch.float64),
        rtol=tolerance,
        atol=tolerance,
    )


@pytest.mark.parametrize("temperature", [1.0, 0.2])
@pytest.mark.parametrize(("kind", "structure"), COMBINATIONS)
def test_evidence_and_determinant_are_the_dense_ones(kind, structure, temperature):
    theta, curvature, prior = make_theta(), make_curvature(structure), random_prior(kind)
    posterior = Posterior(curvature, prior, theta, temperature)
    delta = by_hand(kind, {f.key: f.values for f in prior.factors})
    close(posterior.log_evidence, dense_evidence(curvature, theta, delta, temperature))
    close(posterior.log_det, sum(torch.logdet(dense_posterior(b, delta[n], temperature)) for n, b in curvature))


@pytest.mark.parametrize(("kind", "structure"), COMBINATIONS)
def test_gamma_is_one_minus_delta_times_the_dense_variance(kind, structure):
    theta, curvature, prior = make_theta(), make_curvature(structure), random_prior(kind)
    posterior = Posterior(curvature, prior, theta)
    gamma, total = posterior.gamma(), 0.0
    for name, block in curvature:
        delta = prior.delta()[name].expand(block.shape)
        variance = torch.linalg.inv(dense_posterior(block, delta)).diagonal().reshape(block.shape)
        close(gamma[name], 1 - delta * variance)
        total += float((1 - delta * variance).sum())
    close(posterior.effective_parameters, total)


@pytest.mark.parametrize(("kind", "structure"), COMBINATIONS)
def test_slope_of_the_dense_evidence_is_half_gamma_minus_scatter(kind, structure):
    theta, curvature, prior = make_theta(), make_curvature(structure), random_prior(kind)
    logs = {n: d.expand(theta[n].shape).log().requires_grad_() for n, d in prior.delta().items()}
    dense_evidence(curvature, theta, {n: u.exp() for n, u in logs.items()}).backward()
    posterior = Posterior(curvature, prior, theta)
    for name, gamma in posterior.gamma().items():
        close(0.5 * (gamma - prior.delta()[name] * theta[name] ** 2), logs[name].grad)


@pytest.mark.parametrize("temperature", [1.0, 5.0])
@pytest.mark.parametrize(("kind", "structure"), COMBINATIONS)
def test_precision_is_the_exact_diagonal_without_projection(kind, structure, temperature):
    theta, curvature, prior = make_theta(), make_curvature(structure), random_prior(kind)
    precision = Posterior(curvature, prior, theta, temperature).precision()
    for name, block in curvature:
        exact = torch.cat([H.diagonal() for H, _ in dense_factors(block)]).reshape(block.shape) / temperature
        close(precision[name], exact + prior.delta()[name])


def test_one_precision_a_tensor_is_exact_even_where_eigenvalues_coincide():
    curvature, theta = make_curvature("kron"), make_theta()
    block = curvature.blocks["conv.weight"]
    block.G = torch.eye(4, dtype=torch.float64)[None] * 3.0
    exact = sum(
        torch.logdet(
            torch.block_diag(*[H for H, _ in dense_factors(b)]) + 0.7 * torch.eye(b.shape.numel(), dtype=torch.float64)
        )
        for _, b in curvature
    )
    close(Posterior(curvature, 0.7, theta).log_det, exact)


def test_proposition_1_holds_the_precisions_of_a_tensor_together():
    """Without data the evidence is the same for every δ. The projected one falls as they become different."""
    theta = {name: torch.zeros_like(value) for name, value in make_theta().items()}
    curvature = make_curvature("kron", size=1e-12)
    values = {}
    for spread in (0.0, 1.0, 2.0):
        posterior = Posterior(curvature, random_prior("parameter", spread=spread), theta)
        values[spread] = posterior.log_evidence - curvature.log_likelihood
        exact = sum(d.expand(theta[name].shape).log().sum() for name, d in posterior.delta().items())
        for name, block in curvature:
            delta = posterior.delta()[name].expand(block.shape).flatten()
            H = torch.block_diag(*[H for H, _ in dense_factors(block)])
            exact = exact - torch.logdet(H + torch.diag(delta))
        assert abs(float(exact)) < 1e-6
    assert values[0.0] > -1e-6
    assert values[2.0] < values[1.0] - 1 < values[0.0] - 2


@pytest.mark.parametrize("kind", ["unit", "parameter"])
def test_without_projection_precisions_follow_the_factors_diagonal(kind):
    theta, curvature = make_theta(), make_curvature("kron")
    diagonal = Curvature({name: DiagonalBlock(h) for name, h in curvature.diagonal().items()}, -37.5, 50, "diag", "ggn")
    found, expected = random_prior(kind), random_prior(kind)
    improve(found, curvature, theta, projected=False, steps=200)
    improve(expected, diagonal, theta, steps=200)
    for name, delta in expected.delta().items():
        close(found.delta()[name], delta)
    together = random_prior(kind)
    improve(together, curvature, theta, steps=200)
    weight = "conv.weight"
    assert not torch.allclose(together.delta()[weight], found.delta()[weight], rtol=1e-3)
