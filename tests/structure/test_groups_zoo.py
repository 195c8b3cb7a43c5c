"""The groups of every network of the zoo: what they are, and that they are true."""

from functools import cache

import pytest
import torch
from torch import Tensor, nn

from shaver import zoo
from shaver.structure import Groups, find_groups
from shaver.structure.coupling import OUTPUT, RESIDUAL
from tests.structure.silencing import check_removal, check_units, randomised

SMALL = {
    "fcn": ({"inputs": 12, "hidden": (9, 7), "classes": 3}, (2, 12)),
    "lenet": ({}, (2, 1, 28, 28)),
    "lenet_caffe": ({"widths": (4, 6, 8)}, (2, 1, 28, 28)),
    "digits_cnn": ({}, (2, 1, 8, 8)),
    "mixer": ({"image_size": 8, "patch_size": 4, "dim": 12, "token_dim": 6, "channel_dim": 10}, (2, 1, 8, 8)),
    "resnet18_fixup": ({}, (2, 3, 8, 8)),
    "resnet18": ({}, (2, 3, 8, 8)),
    "wrn16_fixup": ({"depth": 10, "widen": 1}, (2, 3, 8, 8)),
    "wrn16": ({"depth": 10, "widen": 1}, (2, 3, 8, 8)),
    "vit": ({"image_size": 8, "patch_size": 4, "dim": 12, "heads": 3, "mlp_dim": 10}, (2, 1, 8, 8)),
}

UNITS = {
    "fcn": {"layers.0": 9, "layers.2": 7},
    "lenet": {"conv1": 6, "conv2": 16, "conv3": 120, "fc1": 84},
    "lenet_caffe": {"conv1": 4, "conv2": 6, "fc1": 8},
    "digits_cnn": {"conv1": 16, "conv2": 32, "conv3": 32, "fc1": 64},
    "mixer": {f"blocks.{n}.{part}_mlp.fc1": units for n in (0, 1) for part, units in (("token", 6), ("channel", 10))},
    "resnet18_fixup": {f"blocks.{n}.conv1": 64 * 2 ** (n // 2) for n in range(8)},
    "resnet18": {f"blocks.{n}.conv1": 64 * 2 ** (n // 2) for n in range(8)},
    "wrn16_fixup": {"blocks.0.conv1": 16, "blocks.1.conv1": 32, "blocks.2.conv1": 64},
    "wrn16": {"blocks.0.conv1": 16, "blocks.1.conv1": 32, "blocks.2.conv1": 64},
    "vit": {name: units for n in (0, 1) for name, units in ((f"blocks.{n}.attention", 3), (f"blocks.{n}.mlp.fc1", 10))},
}

#: Streams that several layers add up to, in the networks whose streams no LayerNorm mixes.
STREAMS = {
    "resnet18_fixup": {"stem": 64, "blocks.2.conv2": 64, "blocks.4.conv2": 128, "blocks.6.conv2": 256},
    "resnet18": {"stem": 64, "blocks.2.conv2": 128, "blocks.4.conv2": 256, "blocks.6.conv2": 512},
    "wrn16_fixup": {"stem": 16, "blocks.1.conv2": 32, "blocks.2.conv2": 64},
    "wrn16": {"stem": 16, "blocks.1.conv2": 32, "blocks.2.conv2": 64},
}


def network(name: str) -> tuple[nn.Module, Tensor]:
    arguments, shape = SMALL[name]
    example = torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    return randomised(zoo.build(name, seed=0, **arguments)), example


@cache
def found(name: str, residual: bool = False) -> tuple[nn.Module, Tensor, Groups]:
    model, x = network(name)
    return model, x, find_groups(model, x, residual=residual)


def units(groups: Groups, *kinds: str) -> dict[str, int]:
    return {name: group.units for name, group in groups.items() if not kinds or group.kind in kinds}


@pytest.mark.parametrize("name", zoo.names())
def test_every_network_has_the_groups_one_would_name_and_they_hold(name: str) -> None:
    model, x, groups = found(name)
    groups.check(model)
    assert units(groups) == UNITS[name]
    if name not in STREAMS:  # Below, with all of their groups.
        check_units(model, groups, lambda model: model(x))
        check_removal(model, groups, lambda model: model(x))


@pytest.mark.parametrize("name", STREAMS)
def test_residual_streams_are_groups_when_asked_for(name: str) -> None:
    model, x, groups = found(name, residual=True)
    assert units(groups, "residual") == STREAMS[name]
    assert units(groups, "channels") == UNITS[name]
    check_units(model, groups, lambda model: model(x))
    check_removal(model, groups, lambda model: model(x))


@pytest.mark.parametrize("name", ["vit", "mixer"])
def test_streams_under_a_layer_norm_cannot_lose_channels_exactly(name: str) -> None:
    _, _, groups = found(name, residual=True)
    assert units(groups) == UNITS[name]
    assert "mixed with one another" in groups.left_out["blocks.0." + ("mlp" if name == "vit" else "token_mlp") + ".fc2"]


def test_a_shortcut_of_zeros_ties_the_channels_of_the_stages() -> None:
    """Where the shortcut appends channels, those of the first stage live on in all later ones, the new ones do not."""
    _, _, groups = found("resnet18_fixup", residual=True)
    read = {name: [p.index for p in group.slices if p.tensor == "head.weight"] for name, group in groups.items()}
    assert read["stem"][0].flatten().tolist() == list(range(64))
    assert read["blocks.2.conv2"][0].flatten().tolist() == list(range(64, 128))
    assert read["blocks.6.conv2"][0].flatten().tolist() == list(range(256, 512))


def test_the_positions_of_a_flattened_map_belong_to_its_channel() -> None:
    _, _, groups = found("digits_cnn")
    piece = next(p for p in groups["conv3"].slices if p.tensor == "fc1.weight")
    assert (piece.dim, piece.role) == (1, "reads")
    assert torch.equal(piece.index, torch.arange(32 * 4).reshape(32, 4))


def test_a_head_is_its_queries_keys_and_values_and_its_columns_behind() -> None:
    _, _, groups = found("vit")
    group = groups["blocks.0.attention"]
    rows = torch.arange(36).reshape(3, 3, 4).transpose(0, 1).reshape(3, 12)
    assert [(p.tensor, p.dim, p.role) for p in group.slices] == [
        ("blocks.0.attention.qkv.weight", 0, "makes"),
        ("blocks.0.attention.qkv.bias", 0, "makes"),
        ("blocks.0.attention.out.weight", 1, "reads"),
    ]
    assert torch.equal(group.slices[0].index, rows)
    assert torch.equal(group.slices[2].index, torch.arange(12).reshape(3, 4))


def test_norm_parameters_and_statistics_belong_to_the_channel() -> None:
    _, _, groups = found("resnet18")
    made = {p.tensor for p in groups["blocks.0.conv1"].slices if p.role == "makes"}
    norm = {f"blocks.0.norm1.{key}" for key in ("weight", "bias", "running_mean", "running_var")}
    assert made == {"blocks.0.conv1.weight"} | norm


def test_numbers_that_a_layer_shares_belong_to_no_channel() -> None:
    _, _, groups = found("wrn16_fixup", residual=True)
    tensors = {p.tensor for group in groups.values() for p in group.slices}
    assert not {name for name in tensors if "bias" in name.split(".")[-2] or "scale" in name.split(".")[-2]}


def test_what_is_left_out_says_why() -> None:
    _, _, groups = found("wrn16")
    left_out = groups.left_out
    assert left_out["head"] == OUTPUT
    assert left_out["blocks.0.conv2"] == RESIDUAL
    assert set(left_out) == {"head", "stem"} | {
        f"blocks.{n}.{c}" for n in range(3) for c in ("conv2", "projection") if (n, c) != (0, "projection")
    }
