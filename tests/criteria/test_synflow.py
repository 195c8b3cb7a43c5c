"""SynFlow against explicit products of absolute matrices, and the properties it is made for."""

import copy

import pytest
import torch
from torch import nn

from shaver.criteria import score
from shaver.pruning import Ranking
from tests.criteria.small_networks import networks


def perceptron():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5, bias=False), nn.Tanh(), nn.Linear(5, 3))


def explicit(matrices):
    """|W| · ∂R/∂|W| with R = 1ᵀ |W_L| … |W_1| 1, by hand."""
    scores = []
    for i, matrix in enumerate(matrices):
        right = torch.ones(matrices[0].shape[1], dtype=torch.float64)
        for earlier in matrices[:i]:
            right = earlier @ right
        left = torch.ones(matrices[-1].shape[0], dtype=torch.float64)
        for later in reversed(matrices[i + 1 :]):
            left = left @ later
        scores.append(left[:, None] * matrix * right[None, :])
    return scores


def test_the_single_shot_is_the_product_of_absolute_weights():
    model = perceptron()
    matrices = [model[i].weight.detach().double().abs() for i in (0, 2, 4)]
    scores = score(model, "synflow", example=torch.randn(7, 4), rounds=1)
    for got, expected in zip(scores.values(), explicit(matrices), strict=True):
        torch.testing.assert_close(got, expected)


def test_every_layer_carries_the_same_flow():
    scores = score(perceptron(), "synflow", example=torch.randn(1, 4), rounds=1)
    sums = torch.stack([s.sum() for s in scores.values()])
    torch.testing.assert_close(sums, sums[:1].expand(3))


def test_many_rounds_are_the_published_loop():
    """Prune along ρ^(k/n), score what is left, and so on: the same weights are left."""
    model, rounds, sparsity = perceptron(), 20, 0.8
    matrices = [model[i].weight.detach().double().abs() for i in (0, 2, 4)]
    keep = [torch.ones_like(m) for m in matrices]
    total = sum(m.numel() for m in matrices)
    for k in range(1, rounds + 1):
        scores = explicit([m * mask for m, mask in zip(matrices, keep, strict=True)])
        flat = torch.cat([s.flatten() for s in scores])
        left = round(total * (1 - sparsity) ** (k / rounds))
        threshold = flat.sort(descending=True).values[left - 1]
        keep = [(s >= threshold).double() * mask for s, mask in zip(scores, keep, strict=True)]
    scores = score(model, "synflow", example=torch.randn(1, 4), rounds=rounds, sparsity=sparsity)
    masks = Ranking(scores).at(sparsity)
    for mask, expected in zip(masks.values(), keep, strict=True):
        assert torch.equal(mask, expected.bool())


def test_no_layer_is_emptied_where_a_single_shot_empties_one():
    torch.manual_seed(1)
    layers = [nn.Linear(30, 300, bias=False), nn.ReLU(), nn.Linear(300, 300, bias=False), nn.ReLU()]
    model = nn.Sequential(*layers, nn.Linear(300, 3, bias=False))
    kept = {}
    for rounds in (1, 100):
        scores = score(model, "synflow", example=torch.randn(1, 30), rounds=rounds, sparsity=0.999)
        masks = Ranking(scores).at(0.999)
        kept[rounds] = [int(mask.sum()) for mask in masks.values()]
    assert min(kept[1]) == 0
    assert min(kept[100]) > 0


def test_batch_norm_signs_and_statistics_do_not_matter():
    model, _ = networks()["convolution"]
    example = torch.randn(1, 2, 4, 4)
    expected = score(model, "synflow", example=example, rounds=1)
    assert all(bool(s.any()) for s in expected.values())
    with torch.no_grad():
        model[1].running_mean += 100
        model[1].running_var *= 1e-6
        model[1].weight.neg_()
        model[1].bias.sub_(50)
    torch.testing.assert_close(score(model, "synflow", example=example, rounds=1), expected)


@pytest.mark.parametrize("norm", [nn.LayerNorm(6), nn.GroupNorm(2, 6), nn.RMSNorm(6)])
def test_other_norms_are_scalings_too(norm):
    torch.manual_seed(0)
    with torch.no_grad():
        norm.weight.copy_(torch.randn(6))
    first, last = nn.Linear(4, 6), nn.Linear(6, 3)
    scores = score(nn.Sequential(first, norm, last), "synflow", example=torch.randn(1, 4), rounds=1)
    scaled = norm.weight.detach().double().abs()[:, None] * first.weight.detach().double().abs()
    expected = explicit([scaled, last.weight.detach().double().abs()])
    torch.testing.assert_close(list(scores.values()), expected)


def test_an_error_in_the_forward_pass_leaves_no_trace():
    model = perceptron().train()
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"cannot take inputs of shape \(1, 9\)"):
        score(model, "synflow", example=torch.randn(1, 9))
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    assert all(m.training and not m._forward_hooks for m in model.modules())
    assert model[0].weight.dtype == torch.float32


def test_tokens_stay_tokens():
    class Reader(nn.Module):
        def __init__(self):
            super().__init__()
            self.embedding, self.out = nn.Embedding(9, 4), nn.Linear(4, 2, bias=False)

        def forward(self, input_ids):
            return self.out(self.embedding(input_ids).sum(1))

    model, ids = Reader(), torch.tensor([[3, 8, 8], [1, 2, 3]])
    embedded = model.embedding.weight.detach().double().abs()[ids[0]].sum(0)
    expected = model.out.weight.detach().double().abs() * embedded
    torch.testing.assert_close(score(model, "synflow", example={"input_ids": ids}, rounds=1)["out.weight"], expected)
    batches = [{"input_ids": ids, "labels": torch.tensor([0, 1])}]
    torch.testing.assert_close(score(model, "synflow", batches=batches, rounds=1)["out.weight"], expected)


def test_overflow_and_bad_options_are_named():
    deep = nn.Sequential(*(nn.Linear(2, 2, bias=False).double() for _ in range(3)))
    for layer in deep:
        nn.init.constant_(layer.weight, 1e120)
    with pytest.raises(ValueError, match="the range of float64"):
        score(deep, "synflow", example=torch.ones(1, 2), rounds=1)
    with pytest.raises(ValueError, match="rounds=0"):
        score(perceptron(), "synflow", example=torch.ones(1, 4), rounds=0)
    with pytest.raises(ValueError, match=r"example=… \(one input\) or batches"):
        score(perceptron(), "synflow")
