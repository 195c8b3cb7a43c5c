"""Masked units are gone from the function, and stay gone while the rest is trained."""

import pytest
import torch
from torch import nn

from shaver.structure import mask_units
from tests.structure.known_groups import cnn, fcn, images


def test_the_masked_network_is_the_one_without_the_units():
    """Rebuilt by hand at the smaller widths: BatchNorm's shift and Tanh's values at the removed units leave nothing."""
    model, groups = cnn()
    kept = {"0": torch.tensor([True, False, True, True, False, True]), "5": torch.arange(10) % 3 > 0}
    small = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(16, 6), nn.Tanh(), nn.Linear(6, 3),
    ).eval()  # fmt: skip
    a, b = kept["0"].nonzero().flatten(), kept["5"].nonzero().flatten()
    columns = torch.cat([4 * a.unsqueeze(1) + torch.arange(4)]).flatten()
    old, new = model.state_dict(), small.state_dict()
    for name in ("0.weight", "0.bias", "1.weight", "1.bias", "1.running_mean", "1.running_var"):
        new[name] = old[name][a]
    new |= {"5.weight": old["5.weight"][b][:, columns], "5.bias": old["5.bias"][b]}
    new |= {"7.weight": old["7.weight"][:, b], "7.bias": old["7.bias"]}
    small.load_state_dict(new)
    mask_units(model, groups, kept).apply_(model)
    torch.testing.assert_close(model(images()), small(images()), rtol=1e-5, atol=1e-6)
    assert not torch.allclose(model(images()), cnn()[0](images()), atol=1e-3)


def test_every_coupled_parameter_has_a_mask_and_no_buffer_has():
    model, groups = cnn()
    masks = mask_units(model, groups, {name: torch.ones(g.units, dtype=torch.bool) for name, g in groups.items()})
    assert set(masks) == {"0.weight", "0.bias", "1.weight", "1.bias", "5.weight", "5.bias", "7.weight"}
    assert masks.sparsity == 0


def test_held_units_stay_away_during_training():
    model, groups = fcn()
    kept = {"0": torch.arange(8) != 3}
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, weight_decay=0.1)
    with mask_units(model, groups, kept).hold(model, optimizer):
        for step in range(5):
            optimizer.zero_grad()
            model(torch.randn(4, 5, generator=torch.Generator().manual_seed(step))).square().sum().backward()
            optimizer.step()
    state = model.state_dict()
    assert float(state["0.weight"][3].abs().sum() + state["0.bias"][3].abs() + state["2.weight"][:, 3].abs().sum()) == 0
    assert bool((state["0.weight"][2] != 0).all())


@pytest.mark.parametrize(
    ("kept", "message"),
    [
        ({"1": torch.ones(8, dtype=torch.bool)}, r"unknown group '1'. Valid: '0', '2'"),
        ({"0": torch.ones(7, dtype=torch.bool)}, r"kept\['0'\] takes .* 8 units, .*shape \(7,\)"),
        ({"0": torch.ones(8)}, r"kept\['0'\] takes .* not a torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(kept, message):
    model, groups = fcn()
    with pytest.raises(ValueError, match=message):
        mask_units(model, groups, kept)
