"""A unit's score is the sum over everything that belongs to it, for every criterion."""

import pytest
import torch
from torch import nn

import shaver
from shaver import criteria
from shaver.curvature import estimate
from shaver.structure import Group, Groups, Slice, mask_units, score_units, synflow_units, unit_scores
from tests.structure.known_groups import cnn, fcn, images, one_each


def of_unit(model, group, unit):
    """Name → where the unit's entries lie, one entry at a time: slow, and independent of the code under test."""
    found = {}
    for piece in group.slices:
        tensor = dict(model.named_parameters()).get(piece.tensor)
        if tensor is not None:
            mask = found.setdefault(piece.tensor, torch.zeros_like(tensor, dtype=torch.bool))
            for position in piece.index[unit].tolist():
                mask.select(piece.dim, position).fill_(True)
    return found


def batches():
    generator = torch.Generator().manual_seed(3)
    return [(torch.randn(8, 1, 6, 6, generator=generator), torch.randint(0, 3, (8,), generator=generator))] * 2


@pytest.mark.parametrize("criterion", [name for name in criteria.names() if name not in ("synflow", "wanda")])
def test_units_add_up_all_coupled_parameters(criterion):
    model, groups = cnn()
    posterior = shaver.Posterior(estimate(model, batches()), 2.0, dict(model.named_parameters()))
    given = {"posterior": posterior, "batches": batches()}
    found = score_units(model, groups, criterion, **given)
    scores = shaver.score(model, criterion, rule=lambda name, _: name != "7.bias", **given)
    for name, group in groups.items():
        for unit in range(group.units):
            entries = of_unit(model, group, unit)
            expected = sum(scores[tensor][mask].double().sum() for tensor, mask in entries.items())
            torch.testing.assert_close(found[name][unit], expected, rtol=1e-6, atol=1e-12)
    assert {"0.weight", "0.bias", "1.weight", "1.bias", "5.weight"} == set(of_unit(model, groups["0"], 0))


def test_opd_of_a_unit_is_twice_the_rise_of_the_posterior_energy_without_it():
    model, groups = cnn()
    posterior = shaver.Posterior(estimate(model, batches()), 2.0, dict(model.named_parameters()))
    found = score_units(model, groups, "opd", posterior=posterior)
    theta = {name: p.detach() for name, p in model.named_parameters()}
    precision = posterior.precision()
    masks = mask_units(model, groups, {"0": torch.arange(6) != 2})
    energy = sum((precision[n] * (theta[n] * mask - theta[n]).square()).sum() for n, mask in masks.items())
    torch.testing.assert_close(found["0"][2].float(), energy)


def test_wanda_counts_the_weights_alone():
    model, groups = cnn()
    found = score_units(model, groups, "wanda", batches=batches())
    scores = shaver.score(model, "wanda", batches=batches())
    expected = scores["5.weight"].sum(1) + scores["7.weight"].sum(0)
    torch.testing.assert_close(found["5"], expected.double(), rtol=1e-6, atol=0)


def test_an_entry_that_makes_and_reads_counts_once():
    index = one_each(3)
    square = Group("loop", "residual", 3, (Slice("w", 0, index, "makes"), Slice("w", 1, index, "reads")))
    values = torch.arange(9.0).reshape(3, 3)
    found = unit_scores(Groups({"loop": square}), {"w": values})["loop"]
    assert found.tolist() == [
        sum(values[u].tolist()) + sum(values[:, u].tolist()) - float(values[u, u]) for u in range(3)
    ]


def test_a_slice_named_twice_counts_once():
    index = one_each(2)
    twice = Group("fc", "hidden", 2, (Slice("w", 0, index, "makes"), Slice("w", 0, index, "makes")))
    assert unit_scores(Groups({"fc": twice}), {"w": torch.ones(2, 5)})["fc"].tolist() == [5.0, 5.0]


def test_frozen_parameters_do_not_need_a_posterior():
    model, groups = fcn()
    model[0].bias.requires_grad_(False)
    data = [(torch.randn(6, 5), torch.tensor([0, 1, 2, 0, 1, 2]))]
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    posterior = shaver.Posterior(estimate(model, data), 1.0, trained)
    assert bool((score_units(model, groups, "opd", posterior=posterior)["0"] > 0).all())


def test_a_group_without_scores_is_named():
    _, groups = fcn()
    with pytest.raises(ValueError, match=r"no scores for group '2': none of 2\.weight, 2\.bias, 4\.weight"):
        unit_scores(groups, {"0.weight": torch.ones(8, 5)})


@pytest.mark.parametrize("spread", ["uniform", "global"])
def test_synflow_measures_again_through_what_stands(spread):
    """Unit A alone carries much flow, but only through unit B of the next layer; when B falls, A has none left."""
    model = nn.Sequential(nn.Linear(1, 2, bias=False), nn.Linear(2, 2, bias=False), nn.Linear(2, 1, bias=False))
    with torch.no_grad():
        model[0].weight.copy_(torch.tensor([[1.0], [0.9]]))
        model[1].weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
        model[2].weight.copy_(torch.tensor([[1.0, 1.2]]))
    index = one_each(2)
    groups = Groups(
        {
            "0": Group("0", "hidden", 2, (Slice("0.weight", 0, index, "makes"), Slice("1.weight", 1, index, "reads"))),
            "1": Group("1", "hidden", 2, (Slice("1.weight", 0, index, "makes"), Slice("2.weight", 1, index, "reads"))),
        }
    )
    order = synflow_units(model, groups, example=torch.ones(1, 1), rounds=4, sparsity=0.5, spread=spread)
    assert order["0"].argmax() == order["1"].argmax() == 1  # the path 0.9 · 1 · 1.2 carries more than 1 · 1 · 1
    assert sorted(torch.cat(list(order.values())).tolist()) == [0.0, 0.25, 0.5, 0.75]
    with pytest.raises(ValueError, match="rounds=0"):
        synflow_units(model, groups, example=torch.ones(1, 1), rounds=0)


def test_synflow_leaves_a_unit_in_every_group_and_the_model_as_it_was():
    model, groups = cnn()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    order = score_units(model, groups, "synflow", example=images(1), sparsity=0.99, spread="global")
    last = sorted(((v, name) for name, values in order.items() for v in values.tolist()), reverse=True)[:2]
    assert {name for _, name in last} == {"0", "5"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
