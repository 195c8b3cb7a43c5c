"""Proposition 1: the best diagonal in the Kronecker eigenbasis for a diagonal prior."""

import pytest
import torch

from shaver.curvature.blocks import KroneckerBlock
from shaver.evidence.basis import KroneckerBasis, eigen
from shaver.priors import make_prior
from tests.evidence.evidence_cases import covariance, dense_factors

SHAPES = [((4, 3), 1, False), ((4, 2, 3), 2, False), ((3, 5), 1, True), ((2, 3, 2, 2), 1, False), ((5,), 1, False)]


def make_block(shape, groups, transposed, seed=0):
    generator = torch.Generator().manual_seed(seed)
    out = shape[1] if transposed else shape[0] // groups
    inputs = torch.Size(shape).numel() // (out * groups)
    return KroneckerBlock(
        covariance(inputs, groups, generator), covariance(out, groups, generator), torch.Size(shape), transposed
    )


def flat(block, matrix):
    return block.from_matrix(matrix).flatten()


@pytest.mark.parametrize(("shape", "groups", "transposed"), SHAPES)
def test_projection_is_the_diagonal_of_the_rotated_prior(shape, groups, transposed):
    block = make_block(shape, groups, transposed)
    delta = torch.rand(shape, dtype=torch.float64) * 5 + 0.1
    projected = flat(block, KroneckerBasis("w", block).project(delta))
    pieces = dense_factors(block)
    dense = [
        torch.diag(Q.T @ torch.diag(d) @ Q) for (_, Q), d in zip(pieces, delta.flatten().chunk(groups), strict=True)
    ]
    torch.testing.assert_close(projected, torch.cat(dense))


@pytest.mark.parametrize(("shape", "groups", "transposed"), SHAPES)
def test_no_other_diagonal_in_the_eigenbasis_is_nearer(shape, groups, transposed):
    torch.manual_seed(3)
    block = make_block(shape, groups, transposed)
    delta = torch.rand(shape, dtype=torch.float64) * 5 + 0.1
    best = flat(block, KroneckerBasis("w", block).project(delta)).chunk(groups)
    for (H, Q), d, candidate in zip(dense_factors(block), delta.flatten().chunk(groups), best, strict=True):
        eigenvalues = torch.diag(Q.T @ H @ Q)

        def distance(x, H=H, Q=Q, d=d, eigenvalues=eigenvalues):
            return (Q @ torch.diag(eigenvalues + x) @ Q.T - (H + torch.diag(d))).norm()

        at_best = distance(candidate)
        for size in (1e-3, 0.1, 1.0):
            for _ in range(20):
                assert distance(candidate + size * torch.randn_like(candidate)) > at_best


@pytest.mark.parametrize(
    ("shape", "groups", "transposed"), [s for s in SHAPES if len(s[0]) > 1] + [((1, 2, 3), 1, False)]
)
def test_the_unit_prior_by_vectors_is_the_general_projection(shape, groups, transposed):
    torch.manual_seed(4)
    block = make_block(shape, groups, transposed)
    prior = make_prior("unit", {"w": torch.zeros(shape, dtype=torch.float64)})
    for factor in prior.factors:
        factor.values = torch.rand_like(factor.values) * 3 + 0.1
    basis, delta = KroneckerBasis("w", block), prior.delta_of("w")
    general = basis.project(delta)
    torch.testing.assert_close(basis.project(delta, factors=2), general)
    layouts = [factor.layouts["w"] for factor in prior.factors]
    gamma = basis.gamma(delta, general)
    for fast, layout in zip(basis.gamma_sums(delta, general, layouts), layouts, strict=True):
        torch.testing.assert_close(fast, layout.reduce(gamma))


def test_decomposition_is_kept_until_the_factors_change(monkeypatch):
    calls = []
    original = torch.linalg.eigh
    monkeypatch.setattr(torch.linalg, "eigh", lambda x: calls.append(x.shape) or original(x))
    block = make_block((4, 3), 1, False)
    KroneckerBasis("w", block)
    KroneckerBasis("w", block, temperature=2.0)
    assert len(calls) == 2
    block.scale(2.0)
    after = KroneckerBasis("w", block).values_g.sum()
    torch.testing.assert_close(after, block.G.diagonal(dim1=-2, dim2=-1).sum())
    block.A = 3 * block.A  # another tensor, possibly at the old one's address
    torch.testing.assert_close(KroneckerBasis("w", block).values_a.sum(), block.A.diagonal(dim1=-2, dim2=-1).sum())


def test_what_fails_in_float32_is_retried_in_float64(monkeypatch):
    original = torch.linalg.eigh

    def fragile(x):
        if x.dtype == torch.float32:
            raise torch.linalg.LinAlgError("failed to converge")
        return original(x)

    factor = covariance(4, 2, torch.Generator().manual_seed(0)).float()
    expected = torch.linalg.eigvalsh(factor)
    monkeypatch.setattr(torch.linalg, "eigh", fragile)
    values, vectors = eigen(factor, "factor")
    assert values.dtype == vectors.dtype == torch.float32
    torch.testing.assert_close(values, expected, rtol=1e-4, atol=1e-5)


def test_eigenvalues_negative_by_rounding_become_zero():
    thin = torch.randn(1, 30, 2)
    values, _ = eigen(thin @ thin.mT, "factor")
    assert values.min() == 0
    assert values.max() > 1


@pytest.mark.parametrize(("damage", "word"), [(float("nan"), "NaN"), (float("inf"), "infinity"), (-5.0, "indefinite")])
@pytest.mark.parametrize("side", ["A", "G"])
def test_a_damaged_factor_is_named(damage, word, side):
    block = make_block((4, 3), 1, False)
    getattr(block, side)[0, 1, 1] = damage
    with pytest.raises(FloatingPointError, match=rf"factor {side} of 'fc.weight'.*{word}"):
        KroneckerBasis("fc.weight", block)
