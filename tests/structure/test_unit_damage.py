"""Units ranked by what their removal costs after repair."""

import pytest
import torch
from torch import nn

import shaver
from shaver.repairing.damage import DAMPING
from shaver.structure import compact_with_report, find_groups, score_units, unit_damage


def drawn(*shape, seed=1):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def seeded(build):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return build().double().eval()


def mlp():
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def cnn():
    return nn.Sequential(
        *(nn.Conv2d(2, 6, 3), nn.ReLU(), nn.Conv2d(6, 4, 3), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(64, 3)),
    )


def test_the_first_unit_s_score_is_the_cost_by_the_schur_complement():
    model, x = seeded(mlp), drawn(200, 5)
    (name,) = groups = find_groups(model, x[:2])
    found = unit_damage(model, groups, x.split(64))[name]
    with torch.no_grad():
        inputs = torch.cat([model[:2](x), torch.ones(200, 1, dtype=torch.float64)], 1)
        outputs, weight = model(x), model[2].weight
    precision = inputs.T @ inputs
    precision.diagonal()[:-1].add_(DAMPING * precision.diagonal()[:-1].mean())
    costs = []
    for unit in range(7):
        rest = [k for k in range(8) if k != unit]
        side = precision[rest, unit]
        alone = precision[unit, unit] - side @ torch.linalg.solve(precision[rest][:, rest], side)
        costs.append(weight[:, unit].square().sum() * alone / (outputs - outputs.mean(0)).square().sum())
    lowest = int(torch.stack(costs).argmin())
    assert int(found.argmin()) == lowest
    torch.testing.assert_close(found[lowest], costs[lowest], rtol=1e-6, atol=0)
    assert bool((found > 0).all())


def test_a_duplicate_goes_first_and_costs_nothing():
    model, x = seeded(cnn), drawn(60, 2, 8, 8)
    with torch.no_grad():  # unit 4 does what unit 1 does; neither is small
        model[0].weight[4], model[0].bias[4] = model[0].weight[1], model[0].bias[1]
        model[0].weight[[1, 4]] *= 3
    groups = find_groups(model, x[:2])
    scores = unit_damage(model, groups, x.split(20))
    assert int(scores["0"].argmin()) in (1, 4)
    only = type(groups)({"0": groups["0"]}, left_out=groups.left_out, shapes=groups.shapes)
    small = shaver.compact(model, x[:2], sparsity=1 / 6, calibration=x.split(20), groups=only)
    assert small[0].out_channels == 5
    with torch.no_grad():
        difference = (small(x) - model(x)).norm() / model(x).norm()
    assert difference < 0.01  # the damping alone


def test_it_is_the_default_with_calibration_data():
    model, x = seeded(cnn), drawn(40, 2, 8, 8)
    report = compact_with_report(model, x[:2], sparsity=0.5, calibration=iter(x.split(20)))
    named = compact_with_report(model, x[:2], criterion="damage", sparsity=0.5, calibration=x.split(20))
    assert report.choice.widths == {"0": (6, 3), "2": (4, 2)}
    assert all(torch.equal(keep, named.choice.kept[name]) for name, keep in report.choice.kept.items())
    assert report.repaired is not None


def test_errors():
    model, x = seeded(mlp), drawn(20, 5)
    groups = find_groups(model, x[:2])
    with pytest.raises(ValueError, match=r"needs batches=…"):
        score_units(model, groups, "damage")
    with pytest.raises(ValueError, match="empty"):
        unit_damage(model, groups, [])
    with pytest.raises(ValueError, match="posterior"):
        shaver.compact(model, x[:2], sparsity=0.5)
