"""Monte-Carlo Fisher: unbiased for the GGN, within its own standard error, and the same for the same seed."""

import pytest
import torch
from torch import Tensor

from shaver import curvature
from tests.curvature.cases import BY_NAME

CASES = ["mlp", "conv2d", "regression", "poisson", "token-labels", "attention-batch-first", "embedding"]


def flat(result: curvature.Curvature) -> Tensor:
    return torch.cat([values.flatten() for values in result.diagonal().values()])


def z_scores(draws: Tensor, expected: Tensor) -> Tensor:
    """How many standard errors the mean of ``draws`` lies from ``expected``, entry by entry, and for the total.

    A label that is too rare to be drawn is missing in the mean and in its spread. It can be worth a share of the
    largest entry that is about its probability, so no standard error counts as smaller than 0.4 % of that entry.
    """
    draws = torch.cat([draws, draws.sum(1, keepdim=True)], 1)
    expected = torch.cat([expected, expected.sum().reshape(1)])
    error = draws.std(0) / len(draws) ** 0.5
    noisy = error > 1e-9 * expected.max()  # entries without noise must simply be right
    torch.testing.assert_close(draws.mean(0)[~noisy], expected[~noisy], rtol=1e-7, atol=1e-7 * float(expected.max()))
    error[:-1].clamp_(min=0.004 * float(expected[:-1].max()))
    return ((draws.mean(0) - expected) / error)[noisy]


@pytest.mark.parametrize("name", CASES)
def test_converges_to_the_ggn(name: str):
    case = BY_NAME[name]
    model, batches = case.model(), case.batches()
    exact = torch.cat([v.flatten() for v in case.problem(model, batches).diagonal("ggn").values()])
    options = {"likelihood": case.likelihood, "source": "mc", "samples": 4, **case.reading}
    draws = torch.stack([flat(curvature.estimate(model, batches, seed=seed, **options)) for seed in range(60)])
    z = z_scores(draws, exact)
    assert z.abs().max() < 5, "no entry further from the GGN than chance allows"
    assert z.abs()[-1] < 3.5, "the trace agrees too"
    if name == "mlp":  # the test has power: it rejects a 30 % error of scale, and the EF in place of the GGN
        assert z_scores(1.3 * draws, exact).abs().max() > 5
        wrong = torch.cat([v.flatten() for v in case.problem(model, batches).diagonal("ef").values()])
        assert z_scores(draws, wrong).abs().max() > 5


def test_kronecker_gradient_factor_converges_too():
    case = BY_NAME["conv2d"]
    model, batches = case.model(), case.batches()
    factors = case.problem(model, batches).kronecker("ggn", "expand")
    options = {"structure": "kron", "source": "mc", "samples": 4}
    runs = [curvature.estimate(model, batches, seed=seed, **options) for seed in range(60)]
    for name, (A, G) in factors.items():
        torch.testing.assert_close(runs[0].blocks[name].A, A, rtol=1e-10, atol=1e-12)
        draws = torch.stack([run.blocks[name].G for run in runs])
        z = (draws.mean(0) - G) / (draws.std(0) / len(draws) ** 0.5)
        assert z.abs().max() < 5, name


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_the_seed_decides_the_numbers(structure: str):
    case = BY_NAME["lenet"]
    model, batches = case.model(), case.batches()
    one, same, other = (
        flat(curvature.estimate(model, batches, structure=structure, source="mc", seed=seed)) for seed in (3, 3, 4)
    )
    assert torch.equal(one, same)
    assert not torch.allclose(one, other)


def test_more_samples_mean_less_noise_by_the_square_root():
    case = BY_NAME["mlp"]
    model, batches = case.model(), case.batches()

    def spread(samples: int) -> float:
        runs = [curvature.estimate(model, batches, source="mc", samples=samples, seed=s) for s in range(60)]
        return float(torch.stack([flat(run) for run in runs]).var(0).sum())

    assert 4 < spread(1) / spread(8) < 16  # 8, up to the noise of 60 runs


def test_exact_sources_do_not_depend_on_the_seed():
    case = BY_NAME["mlp"]
    model, batches = case.model(), case.batches()
    for source in ("ggn", "ef"):
        one, two = (flat(curvature.estimate(model, batches, source=source, seed=seed)) for seed in (0, 1))
        assert torch.equal(one, two)
