"""The score of a weight is what its removal costs after repair."""

import copy

import pytest
import torch
from torch import nn

import shaver
from shaver.repairing import output_damage, repair


def test_it_is_the_error_that_a_repair_leaves():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        dense = nn.Linear(5, 3).double()
    x = torch.randn(200, 5, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    x[:, 1] += 0.9 * x[:, 0]
    scores = output_damage(dense, [x])["weight"]
    outputs = dense(x).detach()
    for place in ((0, 0), (2, 1), (1, 4)):
        pruned = copy.deepcopy(dense)
        with torch.no_grad():
            pruned.weight[place] = 0
        repair(pruned, [x], reference=dense, damping=1e-12)
        error = (pruned(x).detach() - outputs).square().sum() / (outputs - outputs.mean(0)).square().sum()
        assert float(scores[place]) == pytest.approx(float(error), rel=0.1)  # but for the damping


def test_every_repairable_weight_has_a_score_and_the_model_is_left_alone():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(
            nn.Conv2d(2, 4, 3, groups=2), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3)
        )
        images = torch.randn(40, 2, 4, 4)
    kept = copy.deepcopy(model.state_dict())
    scores = output_damage(model, images.split(20))
    assert {name: score.shape for name, score in scores.items()} == {
        "0.weight": model[0].weight.shape,
        "4.weight": model[4].weight.shape,
    }
    assert scores.degree == 2
    assert all((score >= 0).all() and score.isfinite().all() for score in scores.values())
    assert all(torch.equal(value, kept[name]) for name, value in model.state_dict().items())
    assert shaver.prune(model, scores, 0.5, calibration=images.split(20)).achieved == 0.5


def test_packed_attention():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        scores = output_damage(model, [torch.randn(8, 5, 8)])
    assert scores["self_attn.in_proj_weight"].shape == (24, 8)
    assert (scores["self_attn.in_proj_weight"] > 0).all()
