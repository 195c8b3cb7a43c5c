"""The conditional mean against dense formulas in float64."""

import pytest
import torch

from shaver.repairing.conditional import conditional_mean, removal_damage


@pytest.fixture
def problem():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(40, 7, generator=generator, dtype=torch.float64)
    mean = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    kept = torch.rand(5, 7, generator=generator) > 0.4
    return x, mean, kept


def test_it_is_the_gaussian_s_conditional_mean(problem):
    x, mean, kept = problem
    damping = torch.linspace(0.1, 3, 35, dtype=torch.float64).reshape(5, 7)
    found = conditional_mean(x.T @ x, mean @ (x.T @ x), kept, mean, damping)
    for row in range(5):
        precision = x.T @ x + damping[row].diag()
        keep, gone = kept[row].nonzero()[:, 0], (~kept[row]).nonzero()[:, 0]
        moved = torch.linalg.inv(precision[keep][:, keep]) @ precision[keep][:, gone] @ mean[row, gone]
        torch.testing.assert_close(found[row, keep], mean[row, keep] + moved)
        assert (found[row, gone] == 0).all()


def test_with_other_inputs_it_is_the_ridge_regression_on_the_targets(problem):
    x, mean, kept = problem
    targets = torch.randn(40, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    found = conditional_mean(x.T @ x, targets.T @ x, kept, mean, torch.tensor(0.5, dtype=torch.float64))
    for row in range(5):
        keep = kept[row]
        stacked = torch.cat([x[:, keep], 0.5**0.5 * torch.eye(int(keep.sum()), dtype=torch.float64)])
        side = torch.cat([targets[:, row], 0.5**0.5 * mean[row, keep]])
        expected = torch.linalg.lstsq(stacked, side.unsqueeze(1)).solution[:, 0]
        torch.testing.assert_close(found[row, keep], expected)


def test_rows_that_lose_the_same_inputs_share_one_solve(problem, monkeypatch):
    x, mean, _ = problem
    kept = torch.tensor([True, False, True, True, False, True, True]).expand(5, 7)
    calls = []
    solve = torch.cholesky_solve
    monkeypatch.setattr(torch, "cholesky_solve", lambda *given: (calls.append(given), solve(*given))[1])
    a = x.T @ x
    found = conditional_mean(a, mean @ a, kept, mean, torch.tensor(1e-9))
    assert len(calls) == 1
    keep, gone = kept[0].nonzero()[:, 0], (~kept[0]).nonzero()[:, 0]
    expected = mean[:, keep] + mean[:, gone] @ a[gone][:, keep] @ torch.linalg.inv(a[keep][:, keep])
    torch.testing.assert_close(found[:, keep], expected)


def test_removing_nothing_leaves_the_mean_and_removing_all_leaves_zero(problem):
    x, mean, kept = problem
    a = x.T @ x
    everything, nothing = torch.ones_like(kept), torch.zeros_like(kept)
    torch.testing.assert_close(conditional_mean(a, mean @ a, everything, mean, torch.tensor(0.1)), mean)
    assert (conditional_mean(a, mean @ a, nothing, mean, torch.tensor(0.1)) == 0).all()
    assert (conditional_mean(a, mean @ a, nothing, mean, torch.full((5, 7), 0.1)) == 0).all()


def test_the_damage_is_what_the_posterior_s_energy_rises_by(problem):
    x, mean, _ = problem
    damping = torch.linspace(0.1, 1, 7, dtype=torch.float64)
    precision = x.T @ x + damping.diag()
    damage = removal_damage(x.T @ x, damping)
    for gone in range(7):
        kept = torch.arange(7) != gone
        repaired = conditional_mean(x.T @ x, mean[:1] @ (x.T @ x), kept[None], mean[:1], damping[None])[0]
        moved = repaired - mean[0]
        torch.testing.assert_close(mean[0, gone] ** 2 * damage[gone], 0.5 * moved @ precision @ moved)


def test_a_singular_moment_is_no_error():
    ones = torch.ones(6, 6, dtype=torch.float64)  # six equal inputs
    mean = torch.arange(6, dtype=torch.float64)[None]
    kept = torch.tensor([[True, True, False, False, True, False]])
    found = conditional_mean(ones, mean @ ones, kept, mean, torch.tensor(1e-15))
    assert float(found.sum()) == pytest.approx(15, rel=1e-6)
