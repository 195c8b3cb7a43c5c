"""``prune``: the report, the errors, and a model that stays as it was when something is wrong."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from shaver.criteria import score
from shaver.pruning import prune


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4))


def test_requested_and_achieved_for_each_layer(model):
    biases = [model[0].bias.detach().clone(), model[2].bias.detach().clone()]
    pruned = prune(model, score(model, "magnitude"), 0.9)
    zeros = [int((layer.weight == 0).sum()) for layer in (model[0], model[2])]
    assert pruned.total - pruned.kept == sum(zeros) == round(0.9 * 192)
    assert [layer.total - layer.kept for layer in pruned.layers] == zeros
    assert pruned.requested == 0.9
    assert pruned.achieved == pytest.approx(173 / 192)
    assert torch.equal(model[0].bias, biases[0])
    assert torch.equal(model[2].bias, biases[1])
    text = str(pruned)
    assert "requested 0.9000, achieved 0.9010" in text
    assert "0.weight" in text
    assert pruned.evidence_change is None


def test_global_magnitude_agrees_with_torch(model):
    other = copy.deepcopy(model)
    layers = [(other[0], "weight"), (other[2], "weight")]
    torch_prune.global_unstructured(layers, pruning_method=torch_prune.L1Unstructured, amount=100)
    pruned = prune(model, score(model, "magnitude"), 100 / 192)
    assert torch.equal(pruned.masks["0.weight"], other[0].weight_mask.bool())
    assert torch.equal(model[2].weight, other[2].weight)


def test_zero_sparsity_changes_nothing(model):
    before = model[0].weight.detach().clone()
    assert prune(model, score(model, "magnitude"), 0).achieved == 0
    assert torch.equal(model[0].weight, before)


def test_two_of_four(model):
    pruned = prune(model, score(model, "magnitude"), scope="2:4")
    assert bool(((model[0].weight.reshape(16, 2, 4) != 0).sum(-1) == 2).all())
    assert pruned.requested == "2:4"
    assert pruned.achieved == 0.5
    assert prune(model, score(model, "magnitude"), 0.5, scope="2:4").achieved == 0.5


def test_layer_scope_and_limits_reach_the_ranking(model):
    scores = score(model, "magnitude")
    pruned = prune(model, scores, 0.75, scope="layer")
    assert [layer.sparsity for layer in pruned.layers] == [0.75, 0.75]
    scores = {"0.weight": torch.zeros(16, 8), "2.weight": torch.ones(4, 16)}
    pruned = prune(model, scores, 0.75, cap=0.8, minimum=20)
    assert [layer.kept for layer in pruned.layers] == [26, 22]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 95}, "95 % is 0.95"),
        ({"sparsity": 1.0}, r"in \[0, 1\)"),
        ({"sparsity": -0.5}, r"in \[0, 1\)"),
        ({"sparsity": "much"}, r"in \[0, 1\), not 'much'"),
        ({}, "say how much to remove"),
        ({"sparsity": 0.5, "scope": "globl"}, "unknown scope 'globl'"),
        ({"sparsity": 0.9, "scope": "2:4"}, "fixes the sparsity at 0.5"),
        ({"sparsity": "auto", "scope": "2:4"}, "fixes the sparsity at 0.5"),
        ({"scope": "4:2"}, "must keep fewer"),
        ({"scope": "2:4", "minimum": 3}, "leave out cap, minimum and max_drop"),
        ({"sparsity": "auto"}, "pass posterior=…"),
        ({"sparsity": 0.5, "max_drop": 0.1}, "needs validation data"),
        ({"sparsity": 0.5, "valid": []}, "only used with max_drop"),
        ({"sparsity": 0.999, "cap": 0.9}, "out of reach"),
    ],
)
def test_bad_options_leave_the_model_alone(model, options, message):
    before = {n: t.clone() for n, t in model.state_dict().items()}
    with pytest.raises(ValueError, match=message):
        prune(model, score(model, "magnitude"), **options)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())


def test_scores_that_do_not_fit_leave_the_model_alone(model):
    before = {n: t.clone() for n, t in model.state_dict().items()}
    good = score(model, "magnitude")
    for scores, message in [
        (good | {"5.weight": torch.ones(2, 2)}, "'5.weight', which Sequential does not have"),
        (good | {"2.weight": torch.ones(2, 2)}, r"shape \(2, 2\), the parameter \(4, 16\)"),
        (good | {"2.weight": torch.full((4, 16), float("nan"))}, "64 scores of '2.weight' are NaN"),
        ({}, "no scores"),
        (None, "scores are missing"),
    ]:
        with pytest.raises(ValueError, match=message):
            prune(model, scores, 0.5)
    with pytest.raises(TypeError, match="a dict of tensors"):
        prune(model, [1, 2], 0.5)
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
