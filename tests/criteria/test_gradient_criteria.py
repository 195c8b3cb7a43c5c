"""SNIP and GraSP against the whole data set in one autograd graph, and a dense Hessian."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from shaver.criteria import prunable, score
from tests.criteria.small_networks import networks

CASES = networks()


def dense(model, batches):
    """θ, g and H of the mean loss over the flattened prunable weights."""
    model = copy.deepcopy(model).eval()
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    weights = prunable(model)

    def loss(flat):
        parts = torch.split(flat, [w.numel() for w in weights.values()])
        named = {n: p.reshape(w.shape) for (n, w), p in zip(weights.items(), parts, strict=True)}
        return F.cross_entropy(functional_call(model, named, (x,)), y)

    theta = torch.cat([w.detach().flatten() for w in weights.values()])
    with sdpa_kernel(SDPBackend.MATH):
        return (
            theta,
            torch.autograd.functional.jacobian(loss, theta),
            torch.autograd.functional.hessian(loss, theta),
        )


def flat(scores):
    return torch.cat([s.flatten() for s in scores.values()])


@pytest.mark.parametrize("case", CASES)
def test_snip_is_weight_times_gradient_of_the_mean_loss(case):
    model, batches = CASES[case]
    theta, g, _ = dense(model, batches)
    torch.testing.assert_close(flat(score(model, "snip", batches=batches)), (theta * g).abs(), rtol=1e-9, atol=1e-14)


@pytest.mark.parametrize("case", CASES)
def test_grasp_is_weight_times_hessian_times_gradient(case):
    model, batches = CASES[case]
    theta, g, hessian = dense(model, batches)
    expected = (theta * (hessian @ g)).abs()
    assert expected.max() > 1e-4
    torch.testing.assert_close(flat(score(model, "grasp", batches=batches)), expected, rtol=1e-9, atol=1e-13)


@pytest.mark.parametrize("criterion", ["snip", "grasp"])
def test_one_batch_of_all_equals_many_batches(criterion):
    model, batches = CASES["perceptron"]
    whole = [tuple(torch.cat(parts) for parts in zip(*batches, strict=True))]
    torch.testing.assert_close(
        flat(score(model, criterion, batches=whole)), flat(score(model, criterion, batches=iter(batches)))
    )


@pytest.mark.parametrize("criterion", ["snip", "grasp", "wanda"])
def test_frozen_weights_are_scored_and_stay_frozen(criterion):
    model, batches = copy.deepcopy(CASES["perceptron"])
    expected = score(model, criterion, batches=batches)
    model.requires_grad_(False)
    frozen = score(model, criterion, batches=batches)
    assert all(torch.equal(expected[n], frozen[n]) for n in expected)
    assert not any(p.requires_grad for p in model.parameters())


def test_grasp_reads_a_shuffling_loader_in_the_same_order_twice():
    model, batches = CASES["perceptron"]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    seen = []

    def forward(model, batch):
        seen.append(batch[0])
        return model(batch[0])

    data = torch.utils.data.TensorDataset(x, y)
    loader = torch.utils.data.DataLoader(data, batch_size=4, shuffle=True, drop_last=True)
    state = torch.get_rng_state()
    score(model, "grasp", batches=loader, forward=forward)
    assert torch.equal(state, torch.get_rng_state())
    half = len(seen) // 2
    assert all(torch.equal(a, b) for a, b in zip(seen[:half], seen[half:], strict=True))


def test_dict_batches_and_own_functions_give_the_same_scores():
    model, batches = CASES["perceptron"]
    expected = score(model, "snip", batches=batches)
    dicts = [{"features": x, "label": y} for x, y in batches]
    own = score(
        model,
        "snip",
        batches=dicts,
        forward=lambda network, batch: network(batch["features"]),
        targets=lambda batch: batch["label"],
    )
    assert all(torch.equal(expected[n], own[n]) for n in expected)


def test_regression_loss():
    model, batches = CASES["perceptron"]
    batches = [(x, torch.randn(len(x), 3, dtype=torch.float64)) for x, _ in batches]
    x, y = (torch.cat(parts) for parts in zip(*batches, strict=True))
    loss = 0.5 * (model(x) - y).square().sum(1).mean()
    weight = model[0].weight
    (g,) = torch.autograd.grad(loss, weight)
    scores = score(model, "snip", batches=batches, likelihood="regression")
    torch.testing.assert_close(scores["0.weight"], (weight * g).abs().detach())


def test_a_weight_the_loss_does_not_use_scores_zero():
    model, batches = copy.deepcopy(CASES["perceptron"])
    model.add_module("spare", nn_spare := torch.nn.Linear(3, 3).double())
    model.forward = lambda x: model[2](model[1](model[0](x)))
    for criterion in ("snip", "grasp"):
        scores = score(model, criterion, batches=batches)
        assert not scores["spare.weight"].any()
        assert scores["0.weight"].any()
    assert nn_spare.weight.grad is None
