"""Zeros stay zero while the rest is trained, whatever the optimizer."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shaver.pruning import Masks

OPTIMIZERS = {
    "momentum and decay": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.1, amsgrad=True),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.9, centered=True),
}


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3))
    masks = Masks({n: torch.rand(p.shape) > 0.6 for n, p in model.named_parameters() if p.ndim > 1})
    return model, masks, torch.randn(20, 6), torch.randint(0, 3, (20,))


def train(model, optimizer, x, y, steps=5):
    for _ in range(steps):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def regrown(model, masks):
    return sum(int((p.detach()[~masks[n]] != 0).sum()) for n, p in model.named_parameters() if n in masks)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_pruned_weights_stay_zero_and_so_does_their_state(name):
    model, masks, x, y = build()
    optimizer = OPTIMIZERS[name](model.parameters())
    train(model, optimizer, x, y)  # momentum is in motion when the masks come
    hold = masks.hold(model, optimizer)
    for _ in range(5):
        before = model[0].weight.detach().clone()
        train(model, optimizer, x, y, steps=1)
        assert regrown(model, masks) == 0
        moved = model[0].weight.detach() != before
        assert bool(moved[masks["0.weight"]].any())
        for parameter_name, mask in masks.items():
            parameter = model.get_parameter(parameter_name)
            assert not parameter.grad[~mask].any()
            for value in optimizer.state[parameter].values():
                if value.shape == parameter.shape:
                    assert not value[~mask].any()
    hold.release()
    hold.release()
    train(model, optimizer, x, y)
    assert regrown(model, masks) > 0  # the test above can fail: without the hold they grow back


def test_the_survivors_train_as_in_a_network_without_the_others():
    """Held weights have no influence: the same path as with torch's own reparametrised masks."""
    model, masks, x, y = build()
    other, _, _, _ = build()
    masks.apply_(other)
    masks.to_torch_prune(other)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with masks.hold(model, optimizer):
        train(model, optimizer, x, y)
    train(other, torch.optim.SGD(other.parameters(), lr=0.1, momentum=0.9), x, y)
    torch.testing.assert_close(model(x), other(x))


def test_gradient_clipping_sees_the_survivors_alone():
    model, masks, x, y = build()
    with masks.hold(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        F.cross_entropy(model(x), y).backward()
        assert not model[0].weight.grad[~masks["0.weight"]].any()
        F.cross_entropy(model(x), y).backward()  # accumulated
        assert not model[0].weight.grad[~masks["0.weight"]].any()


def test_without_an_optimizer_every_forward_pass_starts_masked():
    model, masks, x, _ = build()
    hold = masks.hold(model)
    with torch.no_grad():
        model[0].weight.add_(1)
    model(x)
    assert regrown(model, masks) == 0
    hold.release()
    with torch.no_grad():
        model[0].weight.add_(1)
    model(x)
    assert regrown(model, masks) > 0


def test_masks_in_force_can_be_exchanged():
    model, masks, x, y = build()
    optimizer = torch.optim.Adam(model.parameters())
    hold = masks.hold(model, optimizer)
    tighter = masks & {n: torch.rand(m.shape) > 0.5 for n, m in masks.items()}
    hold.update(tighter)
    train(model, optimizer, x, y)
    assert regrown(model, tighter) == 0
    with pytest.raises(ValueError, match="have other parameters"):
        hold.update(Masks({"0.weight": masks["0.weight"]}))
    with pytest.raises(ValueError, match="another model"):
        hold.update(Masks(dict(masks) | {"0.weight": torch.ones(1, dtype=torch.bool)}))
    assert hold.masks is tighter


def test_frozen_parameters_can_be_held():
    model, masks, _, _ = build()
    model[0].weight.requires_grad_(False)
    with masks.hold(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        assert regrown(model, masks) == 0
