"""Pictures of filters: every weight has its pixel, what was removed is black, and compact networks fit beside dense."""

import copy

import matplotlib.image
import pytest
import torch
from torch import nn

import shaver
from shaver.lab.report.filters import filter_bank, layer_bars, precision_histograms, tiles, weights_of


@pytest.fixture(scope="module")
def states():
    """A network, the same with zeros, and the same with fewer units."""
    model = shaver.zoo.build("lenet", seed=0)
    masked = copy.deepcopy(model)
    shaver.prune(masked, shaver.score(masked, "magnitude"), 0.9)
    small = shaver.compact(model, torch.randn(2, 1, 28, 28), criterion="magnitude", sparsity=0.6)
    return {"dense": model, "weights": masked, "units": small}


def test_kernels_are_tiles_with_gaps():
    weight = torch.arange(1.0, 2 * 3 * 2 * 2 + 1).reshape(2, 3, 2, 2)
    image = tiles(weight)
    assert image.shape == (2 * 3 - 1, 3 * 3 - 1)
    assert torch.equal(image[3:5, 6:8], weight[1, 2])
    assert bool(image[2].isnan().all())
    assert bool(image[:, 5].isnan().all())
    assert int((~image.isnan()).sum()) == weight.numel()


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ((10, 84), (10, 84)),
        ((84, 10), (10, 84)),  # the longer side across
        ((6, 1, 5, 5), (5, 35)),
        ((120, 16, 5, 5), (80, 600)),  # no gaps in a large bank
        ((512, 512, 3, 3), (512, 512)),  # nor kernels in a huge one
        ((8, 4, 1, 1), (4, 8)),
        ((4, 2, 7), (3, 31)),
        ((4, 2, 3, 3, 3), (2, 4)),
    ],
)
def test_the_image_has_the_right_size(shape, size):
    image = tiles(torch.ones(shape))
    assert tuple(image.shape) == size


def test_a_compact_network_is_drawn_at_its_first_size(states):
    whole, dense = weights_of(states["units"]), weights_of(states["dense"])
    assert {name: w.shape for name, w in whole.items()} == {name: w.shape for name, w in dense.items()}
    for name, weight in whole.items():
        there = weight != 0
        assert torch.equal(weight[there], dense[name][there])
        assert int(there.sum()) == dict(states["units"].named_parameters())[name].numel()


def test_the_bank_shows_removed_weights_in_black(states, tmp_path):
    files = filter_bank(states, tmp_path / "filters", layers=["fc2.weight"])
    assert [file.name for file in files] == ["filters.svg", "filters.png"]
    pixels = matplotlib.image.imread(tmp_path / "filters.png")[..., :3]
    upper = pixels[40 : int(0.7 * len(pixels))]  # above the scale
    for i, network in enumerate(states.values()):
        third = upper[:, i * upper.shape[1] // 3 : (i + 1) * upper.shape[1] // 3]
        drawn, black = (third < 0.99).any(2).sum(), (third == 0).all(2).sum()
        gone = float((weights_of(network)["fc2.weight"] == 0).float().mean())
        assert black / drawn == pytest.approx(gone, abs=0.03)


def test_every_picture_is_the_same_file_again(states, tmp_path):
    deltas = {"a": {n: torch.rand(p.shape) + 0.1 for n, p in states["dense"].named_parameters()}}
    for number in ("1", "2"):
        filter_bank(states, tmp_path / f"f{number}", suffixes=["svg"])
        layer_bars(states, tmp_path / f"l{number}", suffixes=["svg"])
        precision_histograms(deltas, states["dense"], tmp_path / f"p{number}", suffixes=["svg"])
    for kind in "flp":
        first = (tmp_path / f"{kind}1.svg").read_bytes()
        assert first == (tmp_path / f"{kind}2.svg").read_bytes()
        assert len(first) > 5000


def test_a_unit_prior_broadcasts(tmp_path):
    model = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    delta = {"0.weight": torch.tensor([[1.0], [10.0], [1e6]]), "1.weight": torch.tensor(2.0)}
    assert precision_histograms({"unit": delta}, model, tmp_path / "p", suffixes=["png"])[0].stat().st_size > 1000


def test_many_layers_are_thinned_out_and_others_refused(tmp_path):
    deep = nn.Sequential(*(nn.Linear(3, 3) for _ in range(20)))
    filter_bank({"deep": deep}, tmp_path / "deep", most=4, suffixes=["svg"])
    with pytest.raises(ValueError, match=r"not states of one: '0.weight' has shapes .*\(4, 3\)"):
        filter_bank({"deep": deep, "other": nn.Sequential(nn.Linear(3, 4))}, tmp_path / "x")
