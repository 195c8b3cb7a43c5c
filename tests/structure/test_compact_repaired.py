"""Compaction with calibration data: the units that stay make up for those that go."""

import copy

import pytest
import torch
from torch import nn

import shaver
from shaver.structure import compact_with_report, find_groups
from shaver.structure.groups import mask_units


@pytest.fixture
def dense():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        net = nn.Sequential(
            *(nn.Conv2d(2, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3), nn.ReLU(), nn.Flatten()),
            *(nn.Linear(32, 12), nn.ReLU(), nn.Linear(12, 3)),
        ).double()
        shaver.recalibrate(net, inputs(9))
        return net.eval()


def inputs(seed):
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.randn(192, 2, 3, 3, generator=generator, dtype=torch.float64)
    return list(nn.functional.interpolate(coarse, size=6, mode="bilinear").split(64))


def loss(model, dense):
    x = torch.cat(inputs(2))
    with torch.no_grad():
        return float((model(x) - dense(x)).square().mean())


def test_the_small_network_is_nearer_to_the_whole_one(dense):
    x = inputs(3)[0][:2]
    plain = shaver.compact(dense, x, criterion="magnitude", sparsity=0.5)
    kept = copy.deepcopy(dense.state_dict())
    report = compact_with_report(dense, x, criterion="magnitude", sparsity=0.5, calibration=inputs(1))
    assert [p.shape for p in report.model.parameters()] == [p.shape for p in plain.parameters()]
    assert loss(report.model, dense) < 0.5 * loss(plain, dense)
    assert len(report.repaired.layers) == 4
    assert not report.repaired.unrepaired
    assert all(torch.equal(value, kept[name]) for name, value in dense.state_dict().items())


def test_compact_after_repair_is_masked_after_repair(dense):
    x = inputs(3)[0][:2]
    report = compact_with_report(dense, x, criterion="magnitude", sparsity=0.5, calibration=inputs(1))
    masked = copy.deepcopy(dense)
    masks = mask_units(masked, find_groups(masked, x), report.choice.kept)
    masks.apply_(masked)
    shaver.repair(masked, inputs(1), reference=dense, masks=masks)
    torch.testing.assert_close(report.model(inputs(4)[0]), masked(inputs(4)[0]), rtol=1e-9, atol=1e-9)


def test_in_place_and_as_it_was_after_an_error(dense):
    x = inputs(3)[0][:2]
    kept = copy.deepcopy(dense.state_dict())
    broken = inputs(1)
    broken[1][0] = float("nan")
    with pytest.raises(ValueError, match="NaN or infinity"):
        shaver.compact(dense, x, criterion="magnitude", sparsity=0.5, calibration=broken, in_place=True)
    assert all(torch.equal(value, kept[name]) for name, value in dense.state_dict().items())
    whole = copy.deepcopy(dense)
    small = shaver.compact(dense, x, criterion="magnitude", sparsity=0.5, calibration=inputs(1), in_place=True)
    assert small is dense
    assert small[0].out_channels == 4
    assert loss(small, whole) < 1


def test_interrupted_in_place_leaves_the_network_and_its_optimizer_as_they_were(dense):
    x, kept = inputs(3)[0][:2], copy.deepcopy(dense.state_dict())
    optimizer = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
    dense(x).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    dense.load_state_dict(kept)

    def stop(done, total):
        if (done, total) == (2, 3):  # the second of three passes; there are four layers
            raise KeyboardInterrupt

    arguments = {"sparsity": 0.5, "calibration": inputs(1), "in_place": True, "optimizer": optimizer}
    with pytest.raises(KeyboardInterrupt):
        shaver.compact(dense, x, passes=3, progress=stop, **arguments)
    assert all(torch.equal(value, kept[name]) for name, value in dense.state_dict().items())
    assert all(optimizer.state[p]["momentum_buffer"].shape == p.shape for p in dense.parameters())
    with pytest.raises(ValueError, match="in_place=True"):
        shaver.compact(dense, x, **{**arguments, "in_place": False})
    expected = shaver.compact(dense, x, sparsity=0.5, calibration=inputs(1), passes=3)
    small = shaver.compact(dense, x, passes=3, **arguments)
    assert small is dense
    assert all(optimizer.state[p]["momentum_buffer"].shape == p.shape for p in dense.parameters())
    torch.testing.assert_close(small(inputs(4)[0]), expected(inputs(4)[0]), rtol=1e-9, atol=1e-9)
