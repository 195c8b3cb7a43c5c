"""A removed unit that still gives a constant leaves it in the bias of what reads it, or is refused."""

import pytest
import torch
from torch import nn

from shaver.structure import CompactionError, Group, Groups, Slice, find_groups, remove_units
from tests.structure.compact_cases import numbers, outputs, shaken


def silenced(model, weights, units):
    """The usual way to mask by weights alone: the rows are zero, biases and norms are what they were."""
    with torch.no_grad():
        for name in weights:
            model.get_parameter(name)[units] = 0
    return model


def half(groups, name):
    return {name: torch.arange(groups[name].units) % 2 == 0}


def assert_folded(model, groups, kept, example, biases):
    found = remove_units(model, groups, kept, example, mask=False)
    assert found.folded == biases
    inputs = torch.randn_like(example)
    expected = outputs(model, inputs)
    assert (outputs(found.model, inputs) - expected).abs().max() <= 1e-12 * expected.abs().max()
    return found.model


@pytest.mark.parametrize("activation", [nn.ReLU, nn.Sigmoid, nn.Softplus, nn.Tanh])
def test_a_bias_that_is_left_over(activation):
    model = shaken(
        nn.Sequential(nn.Linear(5, 8), activation(), nn.Linear(8, 6, bias=False), nn.ReLU(), nn.Linear(6, 3))
    )
    groups = find_groups(model, numbers(4, 5))
    silenced(model, ["0.weight"], [1, 3, 5, 7])
    small = assert_folded(model, groups, half(groups, "0"), numbers(4, 5), ("2.bias",))
    assert small[2].bias.requires_grad  # the layer had none
    assert model[2].bias is None


def test_a_batch_norms_shift_before_a_convolution_and_before_a_flattened_map():
    model = shaken(
        nn.Sequential(
            *(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 4, 3, bias=False)),
            *(nn.BatchNorm2d(4), nn.Sigmoid(), nn.Flatten(), nn.Linear(16, 3)),
        )
    )
    example = numbers(4, 1, 6, 6)
    groups = find_groups(model, example)
    silenced(model, ["0.weight", "3.weight"], [1, 3])
    silenced(model, ["0.weight", "0.bias"], [5])
    with torch.no_grad():
        model[1].bias.abs_()
    small = assert_folded(model, groups, half(groups, "0") | half(groups, "3"), example, ("3.bias", "7.bias"))
    assert small[3].bias.shape == (2,)  # the reader's own outputs are fewer too


def test_grouped_convolutions_fold_group_by_group():
    model = shaken(nn.Sequential(nn.Conv2d(2, 8, 1), nn.Conv2d(8, 6, 3, groups=2), nn.Conv2d(6, 2, 1)))
    one = torch.arange(4).unsqueeze(1)
    pairs = torch.stack([torch.arange(4), 4 + torch.arange(4)], 1)  # the same place in both groups
    slices = [
        Slice("0.weight", 0, pairs, "makes"),
        Slice("0.bias", 0, pairs, "makes"),
        Slice("1.weight", 1, one, "reads"),
    ]
    groups = Groups({"0": Group("0", "channels", 4, tuple(slices))})
    silenced(model, ["0.weight"], [1, 3, 5, 7])
    small = assert_folded(model, groups, half(groups, "0"), numbers(3, 2, 5, 5), ("1.bias",))
    assert (small[1].groups, small[1].in_channels) == (2, 4)


def test_zero_padding_is_refused_and_other_padding_is_folded():
    def network(mode):
        conv = nn.Conv2d(6, 4, 3, padding=1, padding_mode=mode)
        return silenced(
            shaken(nn.Sequential(nn.Conv2d(1, 6, 3), nn.Sigmoid(), conv, nn.Flatten())), ["0.weight"], [1, 3, 5]
        )

    one = torch.arange(6).unsqueeze(1)
    slices = [Slice(f"0.{n}", 0, one, "makes") for n in ("weight", "bias")] + [Slice("2.weight", 1, one, "reads")]
    groups = Groups({"0": Group("0", "channels", 6, tuple(slices))})
    example, kept = numbers(3, 1, 6, 6), half(groups, "0")
    with pytest.raises(CompactionError, match=r"group '0' give '2' a constant .* another constant at the border"):
        remove_units(network("zeros"), groups, kept, example, mask=False)
    assert_folded(network("replicate"), groups, kept, example, ("2.bias",))
    assert not remove_units(network("zeros"), groups, kept, example).folded  # masked on both sides: nothing to fold


def test_what_still_varies_and_what_one_sample_cannot_tell():
    model = shaken(nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 3)))
    groups = find_groups(model, numbers(4, 5))
    kept = half(groups, "0")
    with pytest.raises(CompactionError, match=r"what '2' reads of the removed units of group '0' varies"):
        remove_units(model, groups, kept, numbers(4, 5), mask=False)
    silenced(model, ["0.weight"], [1, 3, 5, 7])
    with torch.no_grad():
        model[0].bias.abs_()
    remove_units(model, groups, kept, numbers(1, 5), mask=False)  # varied inputs show that it is constant

    def only_the_example(network, x):
        if not torch.equal(x, numbers(1, 5)):
            raise ValueError("another input")
        return network(x)

    with pytest.raises(CompactionError, match="two samples or more"):
        remove_units(model, groups, kept, numbers(1, 5), mask=False, forward=only_the_example)
    with torch.no_grad():
        model[0].bias[[1, 3, 5, 7]] = 0
    assert not remove_units(model, groups, kept, numbers(1, 5), mask=False).folded  # silent: nothing to fold


def test_an_added_bias_stays_through_a_second_compaction():
    model = shaken(
        nn.Sequential(nn.Linear(5, 8), nn.Sigmoid(), nn.Linear(8, 6, bias=False), nn.ReLU(), nn.Linear(6, 3))
    )
    groups = find_groups(model, numbers(4, 5))
    silenced(model, ["0.weight"], [1, 3, 5, 7])
    small = remove_units(model, groups, half(groups, "0"), numbers(4, 5), mask=False).model
    again = find_groups(small, numbers(4, 5))
    twice = remove_units(small, again, half(again, "2"), numbers(4, 5)).model
    assert twice[2].bias.shape == (3,)
    assert twice.shaver_removed.biases == ("2.bias",)
    assert "2.bias" not in twice.shaver_removed.kept  # the constructor's network has no such tensor to slice
