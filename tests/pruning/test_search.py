"""The highest sparsity within a tolerated loss."""

import pytest
import torch
from torch import nn

from shaver.criteria import score
from shaver.pruning import prune


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Linear(40, 50, bias=False)


def kept_share(model):
    return float((model.weight != 0).float().mean())


@pytest.mark.parametrize("edge", [0.1234, 0.5, 0.987])
def test_bisection_finds_the_edge(model, edge):
    pruned = prune(
        model, score(model, "magnitude"), valid=lambda m: float(1 - kept_share(m) <= edge + 1e-9), max_drop=0.5
    )
    assert edge - 0.0015 <= pruned.achieved <= edge + 1e-9
    assert (pruned.quality_before, pruned.quality_after) == (1.0, 1.0)
    assert kept_share(model) == pytest.approx(1 - pruned.achieved)


def test_the_sparsity_given_is_the_limit(model):
    pruned = prune(model, score(model, "magnitude"), 0.7, valid=lambda m: 1.0, max_drop=0.0)
    assert pruned.achieved == pytest.approx(0.7)


def test_accuracy_on_batches_falls_by_at_most_the_tolerance():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 30), nn.ReLU(), nn.Linear(30, 4))
    x = torch.randn(200, 20)
    y = model(x).argmax(1)  # the dense network is right everywhere
    batches = [(x[:150], y[:150]), (x[150:], y[150:])]
    pruned = prune(model, score(model, "magnitude"), valid=iter(batches), max_drop=0.05)
    reached = float((model(x).argmax(1) == y).float().mean())
    assert pruned.quality_before == 1.0
    assert reached == pytest.approx(pruned.quality_after)
    assert 0.95 - 1e-6 <= reached < 1
    assert 0.05 < pruned.achieved < 0.9


def test_an_error_while_measuring_leaves_the_model_alone(model):
    before, calls = model.weight.detach().clone(), []

    def quality(m):
        calls.append(m)
        if len(calls) == 4:
            raise RuntimeError("no more")
        return kept_share(m)

    with pytest.raises(RuntimeError, match="no more"):
        prune(model, score(model, "magnitude"), valid=quality, max_drop=0.3)
    assert torch.equal(model.weight, before)


def test_bad_arguments(model):
    scores = score(model, "magnitude")
    with pytest.raises(ValueError, match="max_drop, how much quality may be lost, must be a finite"):
        prune(model, scores, valid=lambda m: 1.0, max_drop=-1)
    with pytest.raises(ValueError, match="validation data are empty"):
        prune(model, scores, valid=[], max_drop=0.1)
    with pytest.raises(ValueError, match="needs no validation data"):
        prune(model, scores, "auto", valid=lambda m: 1.0, max_drop=0.1)
    with pytest.raises(ValueError, match=r"shape \(3,\) do not fit targets of shape \(3, 50\)"):
        prune(model, scores, valid=[(torch.randn(3, 40), torch.randn(3, 50))], max_drop=0.1)
