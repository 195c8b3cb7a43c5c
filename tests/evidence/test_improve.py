"""δ learned from the evidence: it rises, both ways meet at its maximum, and the limits are sensible."""

import math

import pytest
import torch

from shaver.curvature import blocks
from shaver.curvature.blocks import Curvature, DiagonalBlock, summed
from shaver.evidence import Posterior, improve, optimal_precision, shrink_factor
from shaver.priors import make_prior
from tests.evidence.evidence_cases import KINDS, STRUCTURES, by_hand, dense_evidence, make_curvature, make_theta

COMBINATIONS = [(kind, structure) for kind in KINDS for structure in STRUCTURES]


def by_rows(name, parameter):
    """A user's own grouping: every first index of a matrix, and all other tensors together."""
    return torch.arange(len(parameter)).reshape(-1, *[1] * (parameter.ndim - 1)) if parameter.ndim > 1 else "rest"


@pytest.mark.parametrize("init", [1e-4, 1.0, 1e4])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", [*KINDS, by_rows])
def test_every_step_of_the_fixed_point_raises_the_evidence(kind, structure, init):
    theta, curvature = make_theta(), make_curvature(structure)
    prior = make_prior(kind, theta, init=init)
    before = Posterior(curvature, prior, theta).log_evidence
    for _ in range(6):
        after = improve(prior, curvature, theta, steps=1).log_evidence
        assert after >= before - 1e-9
        before = after


@pytest.mark.parametrize("init", [1e-2, 1.0, 1e2])
@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", [*KINDS, by_rows])
def test_the_gradient_raises_the_evidence(kind, structure, init):
    theta, curvature = make_theta(), make_curvature(structure)
    prior = make_prior(kind, theta, init=init)
    before = Posterior(curvature, prior, theta).log_evidence
    assert improve(prior, curvature, theta, method="gradient").log_evidence > before
    again = Posterior(curvature, prior, theta).log_evidence
    assert improve(prior, curvature, theta, method="gradient", steps=1).log_evidence >= again  # even from the top


@pytest.mark.parametrize(("kind", "structure"), COMBINATIONS)
def test_both_methods_meet_where_the_dense_evidence_is_flat_and_highest(kind, structure):
    theta, curvature = make_theta(), make_curvature(structure)
    tops = []
    for method, steps in (("fixed_point", 400), ("gradient", 600)):
        prior = make_prior(kind, theta)
        improve(prior, curvature, theta, method=method, steps=steps)
        tops.append(improve(prior, curvature, theta, method=method, steps=300, lr=0.01).log_evidence)  # Adam settles
        logs = {f.key: f.values.log().requires_grad_() for f in prior.factors}
        value = dense_evidence(curvature, theta, by_hand(kind, {k: u.exp() for k, u in logs.items()}))
        value.backward()
        assert max(float(u.grad.abs().max()) for u in logs.values()) < 2e-3
    assert tops[0] == pytest.approx(tops[1], abs=1e-4)
    generator = torch.Generator().manual_seed(5)
    for _ in range(20):
        moved = {k: (u + 0.3 * torch.randn(u.shape, generator=generator)).exp() for k, u in logs.items()}
        assert dense_evidence(curvature, theta, by_hand(kind, moved)) < tops[0]


@pytest.mark.parametrize("size", [20.0, 1e-6])
def test_fixed_point_converges_fast_from_far_away(size):
    """The distance in log δ at least halves each step, also where γ is small and MacKay's whole step swings."""
    theta, curvature = make_theta(), make_curvature("diag", size=size)
    results = []
    for init in (1e-5, 1e8):
        prior = make_prior("layer", theta, init=init)
        improve(prior, curvature, theta)
        results.append(prior.delta())
    for name in theta:
        torch.testing.assert_close(results[0][name], results[1][name], rtol=1e-4, atol=0)


def test_closed_form_is_the_maximum_over_a_grid():
    h, theta = torch.tensor(7.0, dtype=torch.float64), torch.tensor(0.3, dtype=torch.float64)
    grid = torch.linspace(-10, 15, 200_001, dtype=torch.float64).exp()
    evidence = 0.5 * (grid.log() - grid * theta**2 - (h + grid).log())
    assert float(optimal_precision(h, theta)) == pytest.approx(float(grid[evidence.argmax()]), rel=2e-4)


@pytest.mark.parametrize("h", [1e-30, 1e-6, 1.0, 1e6, 1e20])
@pytest.mark.parametrize("theta", [1e-30, 1e-15, 1e-3, 1.0, 1e6])
def test_closed_form_is_stable_in_float32(h, theta):
    exact = optimal_precision(torch.tensor(h, dtype=torch.float64), torch.tensor(theta, dtype=torch.float64))
    root = h * theta**2  # δ solves θ² δ² + hθ² δ − h = 0
    assert float(theta**2 * exact**2 + root * exact) == pytest.approx(h, rel=1e-9)
    single = optimal_precision(torch.tensor(h), torch.tensor(theta))
    if 1e-37 < exact < 1e37:
        assert float(single) == pytest.approx(float(exact), rel=1e-5)
    else:
        assert not single.isnan()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_limits_of_theta_and_curvature_stay_within_the_bounds(kind, dtype):
    values = torch.tensor([0.0, 1e-30, 1.0, 1e15], dtype=dtype)
    h, theta = (t.contiguous() for t in torch.meshgrid(values, values, indexing="ij"))
    curvature = Curvature({"w": DiagonalBlock(h)}, -1.0, 1, "diag", "ggn")
    for method in ("fixed_point", "gradient"):
        prior = make_prior(kind, {"w": theta}, init=3.0)
        posterior = improve(prior, curvature, {"w": theta}, method=method)
        delta = prior.delta()["w"]
        low, high = (math.exp(b) for b in prior.bounds)
        assert float(delta.min()) >= low * 0.999
        assert float(delta.max()) <= high * 1.001
        assert math.isfinite(posterior.log_evidence)


def test_a_weight_the_data_do_not_need_gets_the_highest_precision_and_a_dead_one_the_lowest():
    theta = {"w": torch.tensor([0.0, 0.5, 0.0, 0.5])}
    curvature = Curvature({"w": DiagonalBlock(torch.tensor([10.0, 0.0, 0.0, 10.0]))}, -1.0, 1, "diag", "ef")
    prior = make_prior("parameter", theta, init=2.0, bounds=(math.log(1e-4), math.log(1e7)))
    improve(prior, curvature, theta)
    delta = prior.delta()["w"]
    torch.testing.assert_close(delta[:3], torch.tensor([1e7, 1e-4, 2.0]))  # nothing known of a dead zero: as it was
    assert 1 < float(delta[3]) < 10


@pytest.mark.parametrize("method", ["fixed_point", "gradient"])
@pytest.mark.parametrize(("kind", "structure"), COMBINATIONS)
def test_bounds_hold_for_every_product(kind, structure, method):
    theta, curvature = make_theta(), make_curvature(structure)
    prior = make_prior(kind, theta, bounds=(math.log(0.5), math.log(2.0)))
    improve(prior, curvature, theta, method=method)
    for delta in prior.delta().values():
        assert float(delta.min()) >= 0.5 - 1e-9
        assert float(delta.max()) <= 2.0 + 1e-9


@pytest.mark.parametrize(("kind", "structure"), COMBINATIONS)
def test_temperature_counts_the_curvature_more_often(kind, structure):
    theta = make_theta()
    cold, scaled = make_prior(kind, theta), make_prior(kind, theta)
    improve(cold, make_curvature(structure), theta, temperature=0.2)
    improve(scaled, make_curvature(structure, size=100.0), theta)
    for name, delta in cold.delta().items():
        torch.testing.assert_close(delta, scaled.delta()[name], rtol=1e-6, atol=0)


@pytest.mark.parametrize("structure", STRUCTURES)
def test_float32_finds_what_float64_finds(structure):
    theta, curvature = make_theta(), make_curvature(structure)
    single_theta = {n: t.float() for n, t in theta.items()}
    single = Curvature.from_state_dict(curvature.state_dict())
    for _, block in single:
        for attribute, tensor in block.tensors().items():
            setattr(block, attribute, tensor.float())
    for kind in KINDS:
        exact = improve(make_prior(kind, theta), curvature, theta, steps=100).log_evidence
        prior = make_prior(kind, single_theta)
        assert prior.delta()["conv.weight"].dtype == torch.float32
        assert improve(prior, single, single_theta, steps=100).log_evidence == pytest.approx(exact, abs=1e-3)


def test_unit_prior_switches_off_the_unit_nobody_uses():
    torch.manual_seed(0)
    theta = {"w": torch.randn(6, 5, dtype=torch.float64)}
    theta["w"][:, 2] *= 1e-4
    theta["w"][4] *= 1e-4
    curvature = Curvature({"w": DiagonalBlock(torch.full((6, 5), 100.0, dtype=torch.float64))}, 0.0, 1, "diag", "ggn")
    prior = make_prior("unit", theta)
    improve(prior, curvature, theta, steps=300)
    outputs, inputs = (factor.values for factor in prior.factors)
    assert int(inputs.argmax()) == 2
    assert int(outputs.argmax()) == 4
    assert float(inputs.log().mean()) == pytest.approx(0.0, abs=1e-9)  # the gauge


def test_the_posterior_keeps_its_precision_when_the_prior_moves_on():
    theta, curvature = make_theta(), make_curvature("diag")
    prior = make_prior("parameter", theta)
    old = Posterior(curvature, prior, theta)
    improve(prior, curvature, theta)
    assert all(bool((delta == 1).all()) for delta in old.delta().values())


def test_shrink_moves_to_the_new_mode_and_never_outwards():
    h, old, new = torch.tensor([4.0, 4.0, 4.0]), torch.tensor([1.0, 1.0, 1.0]), torch.tensor([6.0, 0.5, 1e12])
    factor = shrink_factor(h, old, new)
    gradient = 2.0 * (old + h)  # b of the quadratic model ½(h+δ)θ² − bθ whose mode under δ0 is 2
    torch.testing.assert_close(2.0 * factor[[0, 2]], (gradient / (h + new))[[0, 2]])
    assert factor[1] == 1.0
    torch.testing.assert_close(shrink_factor(h, old, new, power=0.5), factor.sqrt())


def test_mistakes_are_answered():
    theta, curvature = make_theta(), make_curvature("diag")
    prior = make_prior("layer", theta)
    with pytest.raises(ValueError, match="did you mean 'gradient'"):
        improve(prior, curvature, theta, method="gradiant")
    with pytest.raises(ValueError, match="temperature must be a finite number above 0, not 0"):
        improve(prior, curvature, theta, temperature=0.0)
    with pytest.raises(FloatingPointError, match=r"the weights 'norm.weight' hold NaN"):
        improve(prior, curvature, theta | {"norm.weight": torch.full((4,), math.nan)})
    curvature.blocks["embedding.weight"].values[0, 0] = math.inf
    with pytest.raises(FloatingPointError, match=r"the curvature of 'embedding.weight'"):
        improve(prior, curvature, theta)
    curvature.blocks["embedding.weight"].values[0, 0] = -1.0
    with pytest.raises(FloatingPointError, match=r"'embedding.weight'.*non-negative"):
        improve(prior, curvature, theta)
    prior.factors[0].values = torch.tensor(math.nan)
    with pytest.raises(FloatingPointError, match=r"prior precision of 'conv.weight'"):
        improve(prior, make_curvature("diag"), theta)


@pytest.mark.parametrize("kind", ["parameter", "unit", "layer"])
def test_large_tensors_are_treated_a_few_rows_at_a_time(kind: str, monkeypatch):
    theta, found = make_theta(), []
    for piece in (10**6, 3):
        monkeypatch.setattr(blocks, "PIECE", piece)
        prior = make_prior(kind, theta)
        posterior = improve(prior, make_curvature("diag"), theta, temperature=0.4)
        found.append((posterior.log_evidence, posterior.effective_parameters, prior.delta()))
    (evidence, effective, delta), (again, effective_again, delta_again) = found
    assert evidence == pytest.approx(again, rel=1e-12)
    assert effective == pytest.approx(effective_again, rel=1e-12)
    for name in delta:
        torch.testing.assert_close(delta[name], delta_again[name], rtol=1e-12, atol=0.0)


def test_summed_adds_what_broadcasting_gives(monkeypatch):
    monkeypatch.setattr(blocks, "PIECE", 5)
    a, b = torch.rand(7, 3, dtype=torch.float64), torch.rand(3, dtype=torch.float64)
    torch.testing.assert_close(summed(torch.mul, a, b), (a * b).sum())
    torch.testing.assert_close(
        summed(torch.exp, torch.tensor(2.0)), torch.tensor(2.0).double().exp(), rtol=1e-6, atol=0
    )
    assert summed(torch.exp, torch.empty(0, 4)) == 0
