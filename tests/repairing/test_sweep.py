"""The column sweep against a naive SparseGPT and against the least squares of each row, in float64."""

import pytest
import torch

from shaver.repairing import conditional, sweep
from shaver.repairing.conditional import conditional_mean, conjugate_gradients
from shaver.repairing.sweep import inverse_factor


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 4, generator=generator, dtype=torch.float64)
    x = x @ torch.randn(4, 24, generator=generator, dtype=torch.float64)
    x = (x + torch.randn(300, 24, generator=generator, dtype=torch.float64)).relu()
    weight = torch.randn(10, 24, generator=generator, dtype=torch.float64)
    kept = torch.rand(10, 24, generator=generator) > 0.5
    return weight, x.T @ x / 300, kept


def damped(moment, share=0.01):
    return moment + share * moment.diagonal().mean() * torch.eye(len(moment), dtype=moment.dtype)


def energy(weight, found, moment):
    moved = found - weight
    return float(((moved @ damped(moment)) * moved).sum())


def naive(weight, moment, choose, width):
    """SparseGPT one column at a time, with a fresh inverse of the remaining precision for each."""
    weight, size = weight.clone(), weight.shape[1]
    kept = torch.ones_like(weight, dtype=torch.bool)
    inverses = [torch.linalg.inv(damped(moment)[j:, j:]) for j in range(size)]
    for j in range(size):
        if j % width == 0:
            block = slice(j, min(j + width, size))
            diagonal = torch.stack([inverses[k][0, 0] for k in range(block.start, block.stop)])
            kept[:, block] = choose(weight[:, block].square() / diagonal, block)
        for row in range(len(weight)):
            if not kept[row, j]:
                weight[row, j:] -= weight[row, j] / inverses[j][0, 0] * inverses[j][0]
                weight[row, j] = 0
    return weight, kept


def lowest(share):
    def choose(costs, block):
        count = round(share * len(costs) * block.stop) - round(share * len(costs) * block.start)
        return costs >= costs.flatten().sort().values[count]

    return choose


def best(n):
    return lambda costs, _: costs >= costs.sort(1, descending=True).values[:, n - 1 : n]


@pytest.mark.parametrize(("share", "block"), [(0.5, 24), (0.7, 8), (0.3, 10)])
def test_chosen_masks_as_the_naive_sweep(problem, share, block):
    weight, moment, _ = problem
    expected, kept = naive(weight, moment, lowest(share), block)
    found, chosen = sweep(weight, moment, sparsity=share, block=block)
    assert torch.equal(chosen, kept)
    torch.testing.assert_close(found, expected)
    assert int((~chosen).sum()) == round(share * weight.numel())


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (3, 3)])
def test_patterns_as_the_naive_sweep(problem, n, m):
    weight, moment, _ = problem
    expected, kept = naive(weight, moment, best(n), m)
    found, chosen = sweep(weight, moment, pattern=(n, m), block=10)
    assert torch.equal(chosen, kept)
    torch.testing.assert_close(found, expected)
    assert (chosen.reshape(10, -1, m).sum(2) == n).all()


def test_a_shorter_last_group_keeps_its_share(problem):
    weight, moment, _ = problem
    _, kept = sweep(weight[:, :22], moment[:22, :22], pattern=(2, 4))
    assert (kept[:, 20:].sum(1) == 1).all()


def test_it_is_the_exact_optimum_where_the_removed_columns_come_first(problem):
    weight, moment, _ = problem
    weight = weight.clone()
    weight[:, :6] *= 1e-6  # the cheapest
    found, kept = sweep(weight, moment, sparsity=0.25)
    assert not kept[:, :6].any()
    exact = conditional_mean(moment, weight @ moment, kept, weight, 0.01 * moment.diagonal().mean())
    torch.testing.assert_close(found, exact)


def test_conjugate_gradients_make_it_the_exact_optimum_for_its_mask(problem):
    weight, moment, _ = problem
    plain, kept = sweep(weight, moment, sparsity=0.5)
    ridge = (0.01 * moment.diagonal().mean()).expand(24)
    exact = conditional_mean(moment, weight @ moment, kept, weight, ridge[0])
    found = conjugate_gradients(moment, weight @ moment + ridge * weight, kept, plain, ridge)
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
    assert energy(weight, exact, moment) < 0.95 * energy(weight, plain, moment)
    assert energy(weight, plain, moment) < 0.95 * energy(weight, weight * kept, moment)


def test_wide_layers_are_solved_by_conjugate_gradients(problem, monkeypatch):
    weight, moment, kept = problem
    damping = torch.linspace(0.01, 2, 240, dtype=torch.float64).reshape(10, 24)  # of each row, as a prior's
    exact = conditional_mean(moment, weight @ moment, kept, weight, damping)
    calls = []
    monkeypatch.setattr(conditional, "CUBES", 100.0)
    monkeypatch.setattr(
        conditional, "conjugate_gradients", lambda *given: (calls.append(1), conjugate_gradients(*given))[1]
    )
    found = conditional_mean(moment, weight @ moment, kept, weight, damping)
    assert calls == [1]
    torch.testing.assert_close(found, exact, rtol=1e-5, atol=1e-6)
    assert (found[~kept] == 0).all()


def test_the_factor_of_the_inverse(problem):
    _, moment, _ = problem
    upper = inverse_factor(moment, 0.01)
    torch.testing.assert_close(upper.T @ upper, torch.linalg.inv(damped(moment)))
    assert torch.equal(upper, upper.triu())
    given = torch.linspace(0.1, 1, 24, dtype=torch.float64)
    upper = inverse_factor(moment, given)
    torch.testing.assert_close(upper.T @ upper, torch.linalg.inv(moment + given.diag()))


@pytest.mark.parametrize(("samples", "damping"), [(1, 0.01), (5, 0.01), (5, 1e-9), (40, 1e-9)])
def test_float32_with_fewer_samples_than_inputs(samples, damping):
    generator = torch.Generator().manual_seed(0)
    x = 1e3 * torch.randn(samples, 64, generator=generator)
    x[:, 3] = 0  # a dead input
    x[:, 5] = x[:, 4]
    weight = torch.randn(8, 64, generator=generator)
    moment = x.T @ x
    ridge = (max(damping, 64 * torch.finfo(x.dtype).eps) * moment.diagonal().mean()).expand(64)
    for choice in ({"sparsity": 0.5}, {"pattern": (2, 4)}):
        start, kept = sweep(weight, moment, damping=damping, **choice)
        assert start.isfinite().all()
        assert start.dtype == torch.float32
        assert (start[~kept] == 0).all()
        found = conjugate_gradients(moment, weight @ moment + ridge * weight, kept, start, ridge)
        error = (x @ (found - weight).T).square().sum()
        assert error < 0.3 * (x @ (weight * ~kept).T).square().sum()


def test_zero_inputs_and_half_precision():
    weight = torch.randn(3, 8, generator=torch.Generator().manual_seed(0)).half()
    found, kept = sweep(weight, torch.zeros(8, 8), sparsity=0.5)
    assert found.dtype == torch.float16
    torch.testing.assert_close(found, weight * kept)
    assert int(kept.sum()) == 12


def test_errors_say_what_would_work(problem):
    weight, moment, _ = problem
    with pytest.raises(ValueError, match="one of sparsity and pattern, not none of them"):
        sweep(weight, moment)
    with pytest.raises(ValueError, match="not both of them"):
        sweep(weight, moment, sparsity=0.5, pattern=(2, 4))
    with pytest.raises(ValueError, match=r"from 0 to 1, not 50"):
        sweep(weight, moment, sparsity=50)
    with pytest.raises(ValueError, match=r"\(5, 4\)"):
        sweep(weight, moment, pattern=(5, 4))
    with pytest.raises(ValueError, match="square"):
        sweep(weight, moment[1:], sparsity=0.5)
    with pytest.raises(ValueError, match="24 inputs, and the moment has 23"):
        sweep(weight, moment[1:, 1:], sparsity=0.5)
    with pytest.raises(ValueError, match="NaN"):
        sweep(weight, moment * float("nan"), sparsity=0.5)
    with pytest.raises(ValueError, match="positive semidefinite"):
        sweep(weight, -moment, sparsity=0.5)
