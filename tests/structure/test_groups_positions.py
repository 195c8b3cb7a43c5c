"""Every place of a flattened map is found, though a ReLU keeps some of them at zero whatever is subtracted."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.structure import Group, Groups, find_groups, mask_units, remove_units
from shaver.structure.arrivals import Arrivals
from shaver.structure.probe import Change, Probe, everything
from tests.structure.compact_cases import copy_of, draw, numbers, outputs, shaken
from tests.structure.silencing import check_units


@pytest.fixture(autouse=True)
def same_networks() -> None:
    torch.manual_seed(0)


class OwnReLU(nn.Module):
    """Selects, so that what is not a number does not get through it."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, torch.zeros_like(x))


class Maxout(nn.Module):
    """The larger of two channels: the smaller one is heard only if it moves up."""

    def forward(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, 2)).amax(2)


def flat(channels: int, places: int) -> list[nn.Module]:
    return [nn.Flatten(), nn.Linear(channels * places, 16), nn.ReLU(), nn.Linear(16, 10)]


#: Name → layers and the shape of a sample, and for the first layer the places at which each unit is read.
NETWORKS: dict[str, tuple[Callable[[], list[nn.Module]], tuple[int, ...], int]] = {
    "stride": (lambda: [nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(), *flat(8, 9)], (1, 8, 8), 9),
    "in place": (lambda: [nn.Conv2d(1, 8, 3, stride=2), nn.ReLU(inplace=True), *flat(8, 9)], (1, 8, 8), 9),
    "kernel of one": (lambda: [nn.Conv2d(2, 8, 1), nn.ReLU(), *flat(8, 9)], (2, 3, 3), 9),
    "one place": (lambda: [nn.Conv2d(1, 8, 3), nn.ReLU(), *flat(8, 1)], (1, 3, 3), 1),
    "two places": (lambda: [nn.Conv2d(1, 8, 3), nn.ReLU(), *flat(8, 2)], (1, 3, 4), 2),
    "three places": (lambda: [nn.Conv2d(1, 7, 3), nn.ReLU(), *flat(7, 3)], (1, 3, 5), 3),
    "four places": (lambda: [nn.Conv2d(1, 6, 3), nn.ReLU6(), *flat(6, 4)], (1, 4, 4), 4),
    "leaky": (lambda: [nn.Conv2d(1, 8, 3), nn.LeakyReLU(), *flat(8, 9)], (1, 5, 5), 9),
    "gelu": (lambda: [nn.Conv2d(1, 8, 3), nn.GELU(), *flat(8, 9)], (1, 5, 5), 9),
    "hardtanh": (lambda: [nn.Conv2d(1, 8, 3), nn.Hardtanh(), *flat(8, 9)], (1, 5, 5), 9),
    "own relu": (lambda: [nn.Conv2d(1, 8, 3), OwnReLU(), *flat(8, 9)], (1, 5, 5), 9),
    "maxout": (lambda: [nn.Conv2d(1, 8, 3), Maxout(), *flat(4, 9)], (1, 5, 5), 9),
    "pooled": (lambda: [nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), *flat(8, 9)], (1, 8, 8), 9),
    "norm": (lambda: [nn.Conv2d(1, 8, 3, 2), nn.BatchNorm2d(8), nn.ReLU(), *flat(8, 9)], (1, 8, 8), 9),
    "depthwise": (
        lambda: [nn.Conv2d(1, 8, 1), nn.ReLU(), nn.Conv2d(8, 8, 3, groups=8), nn.ReLU(), *flat(8, 9)], (1, 5, 5), 9
    ),
    "one dimension": (lambda: [nn.Conv1d(2, 8, 3, stride=2), nn.ReLU(), *flat(8, 6)], (2, 13), 6),
    "three dimensions": (lambda: [nn.Conv3d(1, 5, 2), nn.ReLU(), *flat(5, 12)], (1, 3, 4, 3), 12),
}  # fmt: skip


def check_compact_equals_masked(model: nn.Module, groups: Groups, x: Tensor) -> None:
    kept = draw(groups, 1)
    expected = outputs(copy_of(mask_units(model, groups, kept), model), x)
    difference = outputs(remove_units(model, groups, kept, x).model, x) - expected
    assert difference.abs().max() <= 1e-12 * expected.abs().max()


def read_at(group: Group) -> list[list[int]]:
    (reads,) = [piece.index.tolist() for piece in group.slices if piece.role == "reads"]
    return reads


@pytest.mark.parametrize("samples", [1, 2])
@pytest.mark.parametrize("name", NETWORKS)
def test_every_place_of_a_flattened_map_belongs_to_its_channel(name: str, samples: int) -> None:
    build, sample, places = NETWORKS[name]
    for seed in range(3):
        torch.manual_seed(seed)
        model, x = shaken(nn.Sequential(*build()), seed), numbers(samples, *sample, seed=seed)
        groups = find_groups(model, x)
        channels = len(read_at(groups["0"]))
        assert channels == model[0].out_channels // (2 if name == "maxout" else 1)
        assert read_at(groups["0"]) == torch.arange(channels * places).reshape(channels, places).tolist()
        assert len(groups) == 2
        assert groups.left_out.keys() == {str(len(model) - 1)}
        check_units(model, groups, lambda model: model(x))  # noqa: B023
        if name != "maxout":  # its own code knows how many channels there are
            check_compact_equals_masked(model, groups, x)


def test_inputs_without_a_negative_number_and_of_zeros() -> None:
    for x in (numbers(2, 1, 8, 8).relu(), torch.zeros(2, 1, 8, 8, dtype=torch.float64)):
        model = shaken(nn.Sequential(*NETWORKS["stride"][0]()))
        assert {name: group.units for name, group in find_groups(model, x).items()} == {"0": 8, "3": 16}


def test_a_lenet_without_pooling() -> None:
    for seed in range(3):
        torch.manual_seed(seed)
        convs = [nn.Conv2d(1, 6, 5, stride=2), nn.ReLU(), nn.Conv2d(6, 16, 5, stride=2), nn.ReLU()]
        tail = [nn.Linear(16 * 16, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 10)]
        model, x = shaken(nn.Sequential(*convs, nn.Flatten(), *tail), seed), numbers(4, 1, 28, 28)
        groups = find_groups(model, x)
        assert {name: group.units for name, group in groups.items()} == {"0": 6, "2": 16, "5": 20, "7": 12}
        assert len(read_at(groups["2"])[0]) == 16
        check_compact_equals_masked(model, groups, x)


class Added(nn.Module):
    """Two convolutions whose sum is flattened behind a ReLU."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(1, 6, 3), nn.Conv2d(1, 6, 3)
        self.tail = nn.Sequential(*flat(6, 9))

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.tail(F.relu(self.left(x) + self.right(x)))
        return out


@pytest.mark.parametrize("seed", range(3))
def test_a_sum_is_one_at_every_place(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = shaken(Added(), seed), numbers(1, 1, 5, 5)
    assert "residual stream" in find_groups(model, x).left_out["left"]
    groups = find_groups(model, x, residual=True)
    assert (groups["left"].kind, groups["left"].units) == ("residual", 6)
    check_compact_equals_masked(model, groups, x)


def test_a_sum_is_seen_where_a_relu_hides_what_moves_down() -> None:
    model, x = shaken(Added()), numbers(1, 1, 5, 5)
    with Probe(model, model, x, 60.0) as probe, torch.no_grad():
        assert Arrivals(probe).summed[probe.range_of(("tail.1.weight", 1))].all()


def test_a_third_of_the_numbers_stays_a_third_behind_a_grouped_convolution() -> None:
    model = shaken(nn.Sequential(nn.Conv2d(1, 4, 1), nn.Conv2d(4, 4, 3, groups=4), nn.LeakyReLU(), *flat(4, 9)))
    with Probe(model, model, numbers(1, 1, 5, 5), 60.0) as probe, torch.no_grad():
        change = Change(probe.order[0], everything(4), "prick")
        columns = probe.range_of(("4.weight", 1))
        thirds = [probe.run([change], turn=turn).reached[columns].reshape(4, 9) for turn in range(3)]
    assert torch.stack(thirds).sum(0).eq(1).all()
    assert all(third.sum(1).eq(3).all() for third in thirds)


class Halves(nn.Module):
    """The first channels are read at every place, the others at every second one."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.read = nn.Conv1d(1, 7, 3), nn.Linear(3 * 6 + 4 * 3, 5)
        self.head = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = F.leaky_relu(self.conv(x))
        out: Tensor = self.head(F.gelu(self.read(torch.cat([x[:, :3].flatten(1), x[:, 3:, ::2].flatten(1)], 1))))
        return out


def test_units_that_really_differ_are_groups_of_their_own() -> None:
    model, x = shaken(Halves()), numbers(2, 1, 8)
    groups = find_groups(model, x)
    assert {name: group.units for name, group in groups.items()} == {"conv": 3, "conv#2": 4, "read": 5}
    assert [len(read_at(groups[name])[0]) for name in ("conv", "conv#2")] == [6, 3]
    check_units(model, groups, lambda model: model(x))


class Window(nn.Module):
    """Passes small numbers only: a large one looks to it like any other, and like none at all."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x.abs() < 0.3, x, torch.zeros_like(x))


def test_units_that_only_seem_to_differ_are_left_out() -> None:
    model = shaken(nn.Sequential(nn.Conv2d(1, 4, 3), Window(), *flat(4, 9)))
    x = numbers(2, 1, 5, 5)
    small = model[1](model[0](x)).flatten(1).any(0).reshape(4, 9).sum(1)
    assert len(set(small.tolist())) > 1  # as many places as one could see at each channel
    assert small.min() > 0
    groups = find_groups(model, x)
    assert list(groups) == ["3"]
    assert "0" in groups.left_out


def random_network(draw: random.Random) -> tuple[nn.Module, Tensor]:
    """Convolutions of any stride and kernel with norms and activations, flattened."""
    sides, channels = [draw.randint(5, 9), draw.randint(5, 9)], draw.randint(1, 2)
    sample = (channels, *sides)
    layers: list[nn.Module] = []
    for _ in range(draw.randint(1, 2)):
        kernel, stride, padding, width = draw.randint(1, 3), draw.randint(1, 2), draw.randint(0, 1), draw.randint(2, 9)
        if min(sides) + 2 * padding < kernel:
            break
        layers.append(nn.Conv2d(channels, width, kernel, stride, padding, bias=draw.random() < 0.7))
        sides, channels = [(side + 2 * padding - kernel) // stride + 1 for side in sides], width
        if draw.random() < 0.3:
            layers.append(nn.BatchNorm2d(width))
        layers.append(draw.choice([nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.GELU, nn.Tanh, OwnReLU, nn.Identity])())
        if min(sides) >= 2 and draw.random() < 0.3:
            layers.append(draw.choice([nn.MaxPool2d, nn.AvgPool2d])(2))
            sides = [side // 2 for side in sides]
    layers += [nn.Flatten(), nn.Linear(channels * sides[0] * sides[1], 4), nn.ReLU(), nn.Linear(4, 3)]
    return nn.Sequential(*layers), numbers(draw.randint(1, 3), *sample)


@pytest.mark.parametrize("seed", range(40))
def test_any_small_convolutional_network(seed: int) -> None:
    torch.manual_seed(seed)
    model, x = random_network(random.Random(seed))
    model = shaken(model, seed)
    groups = find_groups(model, x)
    layers = [(name, layer) for name, layer in model.named_children() if isinstance(layer, nn.Conv2d | nn.Linear)]
    widths = {name: len(layer.weight) for name, layer in layers[:-1]}
    assert {name: group.units for name, group in groups.items()} == widths
    for (name, _), (_, reader) in pairwise(layers):
        assert sorted(place for unit in read_at(groups[name]) for place in unit) == list(range(reader.weight.shape[1]))
    check_compact_equals_masked(model, groups, x)
