"""Weights without a scale of their own are found from their gradients, and the prior leaves their norms alone."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.parametrizations import weight_norm

from shaver.invariance import STEPS, ScaleFree, kept_norms, remove_radial
from shaver.spam import SpaM
from tests.spam.toys import images, seeded, sgd, split, train


def network(norm: Callable[[], nn.Module]) -> nn.Module:
    """A convolution of eight channels before the norm, and one more layer after it."""
    return seeded(
        lambda: nn.Sequential(nn.Conv2d(1, 8, 3, bias=False), norm(), nn.ReLU(), nn.Flatten(), nn.Linear(72, 3))
    )


def found_in(model: nn.Module, steps: int = STEPS) -> dict[str, int]:
    batches = split(images(64))
    scale_free = ScaleFree(dict(model.named_parameters()))
    optimizer = sgd(model, 0.05)
    for step in range(steps):
        x, y = batches[step % len(batches)]
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        scale_free.observe()
        optimizer.step()
    return scale_free.groups


@pytest.mark.parametrize(
    ("norm", "groups"),
    [
        (lambda: nn.BatchNorm2d(8), 8),
        (lambda: nn.InstanceNorm2d(8), 8),
        (lambda: nn.GroupNorm(4, 8), 4),
        (lambda: nn.GroupNorm(2, 8), 2),
        (lambda: nn.LayerNorm([8, 3, 3]), 1),
    ],
    ids=["batch", "instance", "group4", "group2", "layer"],
)
def test_the_finest_division_that_a_norm_frees_is_found(norm: Callable[[], nn.Module], groups: int):
    assert found_in(network(norm)) == {"0.weight": groups}


def test_weight_norm_frees_the_scale_of_its_directions():
    model = seeded(lambda: nn.Sequential(weight_norm(nn.Linear(25, 8)), nn.Tanh(), nn.Linear(8, 3)))
    model = nn.Sequential(nn.Flatten(), model)
    assert found_in(model) == {"1.0.parametrizations.weight.original1": 8}


def test_networks_without_norms_have_none_and_few_steps_decide_nothing():
    assert found_in(network(nn.Identity)) == {}
    assert found_in(network(lambda: nn.BatchNorm2d(8)), STEPS - 1) == {}


def test_norms_are_kept_and_directions_change():
    w = nn.Parameter(torch.randn(6, 5, dtype=torch.float64))
    before = w.detach().clone()
    with torch.no_grad(), kept_norms([w], {w: 3}):
        w.mul_(torch.rand(6, 5, dtype=torch.float64))
    torch.testing.assert_close(w.view(3, -1).norm(dim=1), before.view(3, -1).norm(dim=1))
    assert not torch.allclose(w, before)
    with torch.no_grad(), kept_norms([w], {w: 3}):
        w[:2] = 0.0
    assert not w[:2].any(), "what is removed altogether does not come back as NaN"


def test_the_gradient_loses_what_would_change_the_norm():
    w, g = torch.randn(2, 4, 3, dtype=torch.float64)
    tangential = g.clone()
    remove_radial(tangential, w, 2)
    inner = lambda a, b: (a * b).view(2, -1).sum(1)  # noqa: E731
    torch.testing.assert_close(inner(tangential, w), torch.zeros(2, dtype=torch.float64), atol=1e-12, rtol=0)
    u = torch.randn(4, 3, dtype=torch.float64)
    remove_radial(u, w, 2)
    torch.testing.assert_close(inner(tangential, u), inner(g, u))


@pytest.mark.parametrize("proximal", [True, False])
def test_before_a_norm_a_prior_of_the_scale_acts_only_as_the_initial_weight_decay(proximal: bool):
    """One δ per layer acts on the scale of filters only. Before a BatchNorm the learned one must not act at all."""

    def network_and_batches() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
        model = network(lambda: nn.BatchNorm2d(8, affine=False))
        for p in model[4].parameters():
            p.requires_grad_(False)
        return model, split(images(64)) * 4

    def trained(learned: float) -> Tensor:
        model, batches = network_and_batches()
        spam = SpaM(model, 64, prior="layer", initial_precision=2.0, total_steps=10**6, proximal=proximal)
        spam.scale_free.groups, spam.scale_free.steps = {"0.weight": 8}, STEPS
        for factor in spam.prior.factors:
            factor.values = torch.full_like(factor.values, learned)
        train(model, spam, sgd(model, 0.05), batches, 1)
        return model[0].weight.detach()

    model, batches = network_and_batches()
    optimizer = sgd(model, 0.05, weight_decay=0.0 if proximal else 2 / 64)
    for x, y in batches:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
        if proximal:
            model[0].weight.data /= 1 + 0.05 / (1 - 0.9) * 2 / 64
    for learned in (2.0, 500.0):
        torch.testing.assert_close(trained(learned), model[0].weight.detach(), rtol=1e-9, atol=1e-9)


def test_rows_that_were_free_remain_so_in_a_smaller_network():
    model = network(lambda: nn.BatchNorm2d(8))
    scale_free = ScaleFree(dict(model.named_parameters()))
    scale_free.groups = {"0.weight": 8}
    model[0].weight = nn.Parameter(model[0].weight[:5].detach())
    scale_free.select(dict(model.named_parameters()))
    assert scale_free.by_parameter == {model[0].weight: 5}
