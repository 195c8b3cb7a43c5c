"""``shaver.compact``: from a network to a smaller one, with what was asked for beside what was reached."""

import copy

import pytest
import torch

import shaver
from shaver.curvature import estimate
from shaver.measure import cost, flops, latency
from shaver.structure import compact_with_report, find_groups, mask_units, score_units
from shaver.structure.costs import Costs
from tests.structure.known_groups import cnn, images

ZOO = {
    "lenet": ({}, (2, 1, 28, 28)),
    "fcn": ({"inputs": 30, "hidden": [20, 12], "classes": 2}, (2, 30)),
    "vit": ({"dim": 16, "heads": 4, "mlp_dim": 24}, (2, 1, 28, 28)),
    "mixer": ({}, (2, 1, 28, 28)),
    "resnet18": ({"planes": 4}, (2, 3, 16, 16)),
}


def build(name):
    arguments, shape = ZOO[name]
    x = torch.randn(shape, generator=torch.Generator().manual_seed(0))
    return shaver.zoo.build(name, seed=0, **arguments), x


@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize(("target", "spread"), [("flops", "uniform"), ("parameters", "global"), ("units", "global")])
def test_the_small_network_costs_what_was_asked_for(name, target, spread):
    model, x = build(name)
    before = copy.deepcopy(model.state_dict())
    report = compact_with_report(model, x, criterion="magnitude", sparsity=0.5, target=target, spread=spread)
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())
    if target == "units":
        left, all_units = (sum(w[i] for w in report.choice.widths.values()) for i in (1, 0))
        assert left == all_units - round(all_units / 2)
        return
    reached = 1 - getattr(report.after, target) / getattr(report.before, target)
    assert reached == pytest.approx(report.choice.achieved)
    assert 0.5 <= reached < 0.62
    assert report.after.parameters == sum(p.numel() for p in report.model.parameters())


@pytest.mark.parametrize("name", ["lenet", "vit"])
def test_it_computes_what_the_masked_network_does(name):
    model, x = build(name)
    model.double().eval()
    x = x.double()
    report = compact_with_report(model, x, criterion="magnitude", sparsity=0.6)
    mask_units(model, report.groups, report.choice.kept).apply_(model)
    torch.testing.assert_close(report.model(x), model(x), rtol=0, atol=1e-12)


def test_the_best_units_by_opd_stay():
    model, groups = cnn()
    data = [(images(16), torch.arange(16) % 3)]
    posterior = shaver.Posterior(estimate(model, data), 1.0, dict(model.named_parameters()))
    small = shaver.compact(model, images(2), criterion="opd", posterior=posterior, sparsity=0.5)
    scores = score_units(model, groups, "opd", posterior=posterior)
    best = scores["0"].argsort(descending=True)[:3].sort().values
    assert torch.equal(small[0].weight, model[0].weight[best])
    assert torch.equal(small[1].running_var, model[1].running_var[best])
    assert small[5].in_features == 12


@pytest.mark.parametrize("criterion", shaver.criteria.names())
@pytest.mark.parametrize("spread", ["uniform", "global"])
def test_every_criterion_serves(criterion, spread):
    model, _ = cnn()
    data = [(images(8), torch.arange(8) % 3)]
    posterior = shaver.Posterior(estimate(model, data), 1.0, dict(model.named_parameters()))
    small = shaver.compact(
        model, images(2), criterion=criterion, posterior=posterior, batches=data, sparsity=0.5, spread=spread
    )
    assert (small[0].out_channels, small[5].out_features) == (3, 5) or spread == "global"
    assert small[0].out_channels + small[5].out_features == 8


def test_synflow_needs_nothing_but_the_example():
    model, _ = cnn()
    assert shaver.compact(model, images(2), criterion="synflow", sparsity=0.5)[0].out_channels == 3


def test_masks_say_which_units_go_and_what_they_left_stays_what_it_was():
    model, groups = cnn()
    kept = {"0": torch.arange(6) > 1, "5": torch.arange(10) != 7}
    masks = mask_units(model, groups, kept)
    masks.apply_(model)
    report = compact_with_report(model, images(2), masks=masks)
    assert {name: keep.tolist() for name, keep in report.choice.kept.items()} == {
        n: k.tolist() for n, k in kept.items()
    }
    torch.testing.assert_close(report.model(images()), model(images()), rtol=1e-5, atol=1e-6)
    with pytest.raises(ValueError, match=r"remove every unit of .*5"):
        shaver.compact(model, images(2), masks=mask_units(model, groups, {"5": torch.zeros(10, dtype=torch.bool)}))


def test_in_place_the_optimizer_follows():
    model, _ = cnn()
    optimizer = torch.optim.Adam(model.parameters())
    model(images()).square().sum().backward()
    optimizer.step()
    small = shaver.compact(model, images(2), criterion="magnitude", sparsity=0.5, in_place=True, optimizer=optimizer)
    assert small is model
    assert optimizer.state[model[0].weight]["exp_avg"].shape == model[0].weight.shape == (3, 1, 3, 3)


def test_saved_and_loaded_again(tmp_path):
    model, x = build("lenet")
    small = shaver.compact(model, x, criterion="magnitude", sparsity=0.5, target="flops", round_to=2)
    assert all(width % 2 == 0 for width in (small.conv1.out_channels, small.conv2.out_channels, small.fc1.out_features))
    shaver.save(small, tmp_path)
    torch.testing.assert_close(shaver.load(tmp_path)(x), small(x))


def test_the_report_shows_widths_and_cost():
    model, x = build("lenet")
    text = str(compact_with_report(model, x, criterion="magnitude", sparsity=0.5))
    assert "conv1       6       3    0.5000" in text
    assert "FLOPs per sample       463,440 →        159,480  ÷ 2.91" in text


def test_costs_are_those_of_the_compact_network_and_measured_once():
    model, x = build("vit")
    groups = find_groups(model, x)
    kept = {name: torch.arange(group.units) % 2 == 0 for name, group in groups.items()}
    small = shaver.structure.remove_units(model, groups, kept, x).model
    assert Costs(model, groups, "flops", x)(kept) == flops(small, x).dense
    assert Costs(model, groups, "parameters")(kept) == cost(small, x).parameters
    costs = Costs(model, groups, "latency", x)
    assert costs(kept) == costs({name: ~keep for name, keep in kept.items()})  # the same widths, so the same number
    assert costs.dense > 0


def test_a_share_of_latency_is_measured():
    """A network whose hidden layer is nearly all of its time: fewer units, less time."""
    model = shaver.zoo.build("fcn", seed=0, inputs=256, hidden=[1024], classes=2)
    x = torch.randn(16, 256)
    report = compact_with_report(model, x, criterion="magnitude", sparsity=0.4, target="latency")
    assert report.choice.achieved >= 0.4
    assert latency(report.model, x, batch_size=16).median < latency(model, x, batch_size=16).median


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 80}, "80 % is 0.8"),
        ({"criterion": "opd", "sparsity": 0.5}, "criterion 'opd' needs posterior"),
        ({"criterion": "snip", "sparsity": 0.5}, "needs batches"),
        ({"optimizer": True}, "in_place=True"),
    ],
)
def test_errors_come_before_any_change(options, message):
    model, _ = cnn()
    if "optimizer" in options:
        options = {"optimizer": torch.optim.SGD(model.parameters(), 0.1)}
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=message):
        shaver.compact(model, images(2), **({"criterion": "magnitude"} | options))
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
