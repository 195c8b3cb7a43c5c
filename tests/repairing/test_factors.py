"""Repair without data, from the Kronecker factors of a posterior."""

import copy

import pytest
import torch
from torch import nn

import shaver
from shaver.repairing import repair
from tests.repairing.test_repair import cnn, data, halved, loss, mlp, same, seeded, state


def posterior_of(model, x, prior=0.3, temperature=1.0, structure="kron"):
    y = torch.randint(0, 3, (len(x),), generator=torch.Generator().manual_seed(4))
    batches = list(zip(x.split(32), y.split(32), strict=True))
    curvature = shaver.curvature.estimate(model, batches, structure=structure)
    return shaver.Posterior(curvature, prior, model, temperature)


@pytest.mark.parametrize(("build", "shape", "temperature"), [(mlp, (6,), 1.0), (cnn, (2, 8, 8), 0.5)])
def test_each_row_is_the_mean_of_the_posterior_given_the_zeros(build, shape, temperature):
    dense = seeded(build)
    posterior = posterior_of(dense, data(96, *shape), temperature=temperature)
    pruned = halved(dense)
    masks = {name: p != 0 for name, p in pruned.named_parameters()}
    repair(pruned, reference=dense, posterior=posterior)
    for name, block in posterior.curvature:
        if name.endswith("bias") or block.shape[0] == block.shape.numel():
            assert torch.equal(pruned.get_parameter(name), dense.get_parameter(name))
            continue
        found, mean = (block.to_matrix(net.get_parameter(name).detach()) for net in (pruned, dense))
        for group, moment in enumerate(block.A):
            for row, kept in enumerate(block.to_matrix(masks[name])[group]):
                precision = block.G[group, row, row] * moment / temperature + 0.3 * torch.eye(len(moment))
                rest, gone = kept.nonzero()[:, 0], (~kept).nonzero()[:, 0]
                covariance = torch.linalg.inv(precision)  # E[θ_K | θ_R = 0] = θ_K − Σ_KR Σ_RR⁻¹ θ_R
                moved = covariance[rest][:, gone] @ torch.linalg.solve(
                    covariance[gone][:, gone], mean[group, row, gone]
                )
                torch.testing.assert_close(
                    found[group, row, rest], mean[group, row, rest] - moved, rtol=1e-6, atol=1e-8
                )
                assert not bool(found[group, row, gone].any())


def test_a_first_layer_without_bias_gets_what_a_pass_over_the_same_data_gives():
    dense, x = seeded(lambda: nn.Sequential(nn.Linear(6, 3, bias=False))), data(96, 6)
    x[:, 1:] += x[:, :-1]
    by_factors, by_data = halved(dense), halved(dense)
    posterior = posterior_of(dense, x, prior=1e-9)
    repair(by_factors, reference=dense, posterior=posterior)
    repair(by_data, x.split(32), reference=dense, damping=1e-9)
    torch.testing.assert_close(by_factors[0].weight, by_data[0].weight, rtol=1e-5, atol=1e-6)
    for pruned, source in ((by_factors, None), (by_data, x.split(32))):
        repair(pruned, source, reference=dense, posterior=posterior if source is None else None, damping=0.1)
    torch.testing.assert_close(by_factors[0].weight, by_data[0].weight)


@pytest.mark.parametrize("temperature", [0.02, 1.0, 50.0])
def test_prior_and_temperature_damp_a_pass_over_data_as_they_damp_the_factors(temperature):
    """P = A G/T + δ: the colder the posterior, the less the prior holds the weights."""
    dense, x = seeded(lambda: nn.Sequential(nn.Linear(6, 3, bias=False))), data(96, 6)
    x[:, 1:] += x[:, :-1]
    posterior = posterior_of(dense, x, prior=2.0, temperature=temperature)
    by_factors, by_data = halved(dense), halved(dense)
    repair(by_factors, reference=dense, posterior=posterior)
    repair(by_data, x.split(32), reference=dense, posterior=posterior)
    torch.testing.assert_close(by_factors[0].weight, by_data[0].weight, rtol=1e-6, atol=1e-9)
    at_one = halved(dense)
    repair(at_one, x.split(32), reference=dense, posterior=posterior_of(dense, x, prior=2.0 * temperature))
    torch.testing.assert_close(by_data[0].weight, at_one[0].weight, rtol=1e-6, atol=1e-9)


def test_one_weight_with_an_enormous_precision_does_not_hide_the_curvature_of_its_row():
    """As after SpaM in single precision, where H + δ rounds H away."""
    dense, x = seeded(lambda: nn.Sequential(nn.Linear(6, 3, bias=False))), data(96, 6)
    x[:, 1:] += x[:, :-1]
    delta = torch.full((3, 6), 0.3, dtype=torch.float64)
    delta[:, 5] = 1e12
    found = []
    for kind in (torch.float64, torch.float32):
        model, inputs = copy.deepcopy(dense).to(kind), x.to(kind)
        pruned = halved(model)
        repair(pruned, reference=model, posterior=posterior_of(model, inputs, prior={"0.weight": delta.to(kind)}))
        found.append(pruned[0].weight.detach().double())
    torch.testing.assert_close(found[0], found[1], rtol=1e-3, atol=1e-4)
    assert (found[0] - dense[0].weight)[halved(dense)[0].weight != 0].abs().max() > 0.01


def test_outputs_come_nearer_to_the_dense_network():
    dense, x = seeded(mlp), data(256, 6)
    x[:, 1:] += 2 * x[:, :-1]
    plain = halved(dense, 0.4)
    fitted = copy.deepcopy(plain)
    report = repair(fitted, reference=dense, posterior=posterior_of(dense, x, prior=1e-3))
    assert loss(fitted, dense, x) < 0.8 * loss(plain, dense, x)
    assert all(layer.after <= layer.before for layer in report.layers)
    assert not report.unrepaired


def test_what_has_no_factors_is_named_and_wrong_calls_are_refused():
    dense = seeded(cnn)
    pruned, x = halved(dense), data(64, 2, 8, 8)
    posterior = posterior_of(dense, x)
    before = state(pruned)
    with pytest.raises(ValueError, match="batches of inputs, or a posterior with Kronecker factors"):
        repair(pruned, reference=dense)
    with pytest.raises(ValueError, match="Kronecker factors"):
        repair(pruned, reference=dense, posterior=posterior_of(dense, x, structure="diag"))
    with pytest.raises(ValueError, match="passes=2"):
        repair(pruned, reference=dense, posterior=posterior, passes=2)
    assert same(pruned, before)
    report = repair(pruned, reference=dense, posterior=posterior)
    assert report.unrepaired == {"1": "BatchNorm needs batches of inputs"}
    assert [layer.name for layer in report.layers] == ["0.weight", "3.weight", "6.weight"]
    whole = copy.deepcopy(dense)
    assert not repair(whole, reference=dense, posterior=posterior).layers
    assert same(whole, state(dense))
