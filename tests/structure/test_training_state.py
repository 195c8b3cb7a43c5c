"""Training goes on without a jump: optimizer, scheduler, SpaM and held masks follow a network that became smaller."""

from copy import deepcopy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shaver.curvature import estimate
from shaver.spam import SpaM
from shaver.structure import find_groups, mask_units, remove_units
from tests.structure.compact_cases import numbers, shaken

OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, 0.05, momentum=0.9, nesterov=True),
    "Adam": lambda p: torch.optim.AdamW(p, 0.01, amsgrad=True),
    "RMSprop": lambda p: torch.optim.RMSprop(p, 0.01, centered=True, momentum=0.5),
    "Adafactor": lambda p: torch.optim.Adafactor(p, 0.01),
}


def network():
    torch.manual_seed(0)
    return shaken(
        nn.Sequential(
            *(nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 8, 2), nn.ReLU(), nn.Flatten(), nn.Linear(8, 10), nn.ReLU(), nn.Linear(10, 3)),
        )
    ).train()


def batches(count=12):
    y = torch.arange(16) % 3
    return [(numbers(16, 1, 6, 6, seed=s) + y.reshape(-1, 1, 1, 1), y) for s in range(count)]


def train(model, optimizer, data, spam=None, scheduler=None):
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step() if spam is None else spam.step(optimizer)
        if scheduler is not None:
            scheduler.step()


def halves(groups):
    return {name: torch.arange(group.units) % 2 == 0 for name, group in groups.items()}


class Pair:
    """The same training twice: one network is masked and held so, its twin is made smaller in place."""

    def __init__(self, build, warm_up=3, **spam):
        self.data = batches()
        self.masked, self.small = network(), network()
        self.groups = find_groups(self.masked.eval(), self.data[0][0])
        self.kept = halves(self.groups)
        self.masks = mask_units(self.masked.train(), self.groups, self.kept)
        self.sides = []
        for model in (self.masked, self.small):
            hold = self.masks.hold(model)
            optimizer = build(model.parameters())
            hold.release()
            hold = self.masks.hold(model, optimizer)
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
            attached = SpaM(model, 192, **spam) if spam else None
            train(model, optimizer, self.data[:warm_up], attached, scheduler)
            self.sides.append((model, optimizer, scheduler, attached, hold))
        model, optimizer, _, attached, hold = self.sides[1]
        self.parameters = list(model.parameters())
        x = self.data[0][0]
        done = remove_units(
            model, self.groups, self.kept, x, in_place=True, optimizer=optimizer, spam=attached, hold=hold
        )
        self.record = done.record

    def go_on(self, steps):
        for model, optimizer, scheduler, attached, _ in self.sides:
            train(model, optimizer, self.data[3 : 3 + steps], attached, scheduler)

    def stays(self, name, tensor):
        for dim, positions in self.record.kept.get(name, {}).items():
            tensor = tensor.index_select(dim, positions)
        return tensor

    def assert_same_weights(self, tolerance=1e-10):
        for name, value in self.masked.state_dict().items():
            torch.testing.assert_close(self.small.state_dict()[name], self.stays(name, value), rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", ["momentum", "Adam", "RMSprop"])
def test_the_small_network_trains_as_the_masked_one_does(kind):
    pair = Pair(OPTIMIZERS[kind])
    assert pair.small[0].out_channels == 3
    assert all(a is b for a, b in zip(pair.parameters, pair.small.parameters(), strict=True))
    pair.assert_same_weights()
    pair.go_on(4)
    pair.assert_same_weights()
    rates = [optimizer.param_groups[0]["lr"] for _, optimizer, *_ in pair.sides]
    assert rates[0] == rates[1] < OPTIMIZERS[kind](pair.small.parameters()).param_groups[0]["lr"]


def test_factored_state_follows_along_the_dimensions_it_has():
    model = network()
    optimizer = OPTIMIZERS["Adafactor"](model.parameters())
    data = batches()
    train(model, optimizer, data[:2])
    groups = find_groups(model, data[0][0])
    before = {name: dict(optimizer.state[p]) for name, p in model.named_parameters()}
    record = remove_units(model, groups, halves(groups), data[0][0], in_place=True, optimizer=optimizer).record
    for name, p in model.named_parameters():
        for key, value in before[name].items():
            for dim, positions in record.kept.get(name, {}).items():
                if value.ndim and value.shape[dim] > 1:
                    value = value.index_select(dim, positions)
            assert torch.equal(optimizer.state[p][key], value), (name, key)
    train(model, optimizer, data[2:4])


@pytest.mark.parametrize("source", ["ef", "mc"])
@pytest.mark.parametrize("prior", ["parameter", "unit", "layer", "scalar"])
def test_spams_precisions_and_curvature_are_those_of_the_weights_that_stayed(prior, source):
    pair = Pair(OPTIMIZERS["momentum"], prior=prior, source=source, every=1, update=3, burn_in=0, seed=3)
    whole, small = pair.sides[0][3], pair.sides[1][3]
    assert whole.updates == small.updates == 1

    def assert_same():
        for name, h in whole.curvature.diagonal().items():
            torch.testing.assert_close(small.curvature.diagonal()[name], pair.stays(name, h), rtol=1e-9, atol=1e-12)
            delta = whole.prior.delta_of(name).expand(h.shape)
            mine = small.prior.delta_of(name).expand(small.theta[name].shape)
            torch.testing.assert_close(mine, pair.stays(name, delta), rtol=1e-9, atol=0)

    assert_same()
    pair.assert_same_weights()
    pair.go_on(1)  # its own step and look, before δ is updated again
    pair.assert_same_weights()
    assert_same()
    pair.go_on(2)
    assert whole.updates == small.updates == 2
    if prior == "parameter":  # every weight has its own δ, so an update is the same too
        pair.assert_same_weights()
        assert_same()
    small.posterior.log_evidence  # noqa: B018  # shapes of prior, curvature and weights agree


def test_a_users_own_grouping_follows():
    def by_row(name, parameter):
        return (
            torch.arange(len(parameter)).reshape(-1, *[1] * (parameter.ndim - 1)) if parameter.ndim > 1 else "vectors"
        )

    pair = Pair(OPTIMIZERS["Adam"], prior=by_row, every=1, update=2, burn_in=0)
    whole, small = pair.sides[0][3], pair.sides[1][3]
    for name in whole.prior.names:
        delta = whole.prior.delta_of(name).expand(whole.theta[name].shape)
        mine = small.prior.delta_of(name).expand(small.theta[name].shape)
        torch.testing.assert_close(mine, pair.stays(name, delta), rtol=1e-9, atol=0)
    pair.go_on(3)


@pytest.mark.parametrize("structure", ["kron", "diag"])
def test_curvature_learned_by_epochs_follows(structure):
    model, data = network(), batches(3)
    groups = find_groups(model, data[0][0])
    kept = halves(groups)
    mask_units(model, groups, kept).apply_(model)
    whole = estimate(model, data, structure=structure, source="ggn")
    spam = SpaM(model, 48, structure=structure, online=False, source="ggn", prior="layer")
    spam.update(data)
    spam._curvature = deepcopy(whole)
    remove_units(model, groups, kept, data[0][0], in_place=True, spam=spam)
    fresh = estimate(model, data, structure=structure, source="ggn")  # of the small network, from scratch
    for name, block in fresh:
        mine = spam.curvature.blocks[name]
        assert mine.shape == block.shape
        for key, tensor in block.tensors().items():
            torch.testing.assert_close(mine.tensors()[key], tensor, rtol=1e-9, atol=1e-12)
    spam.end_epoch(data)


def test_an_added_bias_is_trained_and_has_a_prior():
    x, y = numbers(16, 5), torch.arange(16) % 3
    for prior in ("unit", "scalar"):
        torch.manual_seed(0)
        model = shaken(nn.Sequential(nn.Linear(5, 8), nn.Sigmoid(), nn.Linear(8, 3, bias=False))).train()
        groups = find_groups(model, x)
        optimizer = torch.optim.Adam(
            [{"params": [model[0].weight, model[0].bias]}, {"params": [model[2].weight]}], 0.01
        )
        spam = SpaM(model, 16, prior=prior, every=1, update=2, burn_in=0)
        train(model, optimizer, [(x, y)] * 2, spam)
        with torch.no_grad():
            model[0].weight[:3] = 0
        kept = {"0": torch.arange(8) > 2}
        remove_units(model, groups, kept, x, mask=False, in_place=True, optimizer=optimizer, spam=spam)
        bias = model[2].bias
        assert optimizer.param_groups[1]["params"] == [model[2].weight, bias]
        before = bias.detach().clone()
        assert bias in spam.delta_by_parameter()
        train(model, optimizer, [(x, y)] * 3, spam)
        assert not torch.equal(bias, before)
        assert spam.prior.delta_of("2.bias").expand(3).shape == (3,)
        assert spam.posterior.precision()["2.bias"].shape == (3,)


def test_gradients_and_a_loss_that_somebody_kept():
    model, (x, y) = network(), batches()[0]
    groups = find_groups(model, x)
    loss = F.cross_entropy(model(x), y)  # its graph stays alive, with the old shapes
    loss.backward(retain_graph=True)
    old = {name: p.grad.clone() for name, p in model.named_parameters()}
    record = remove_units(model, groups, halves(groups), x, in_place=True).record
    for name, p in model.named_parameters():
        expected = old[name]
        for dim, positions in record.kept.get(name, {}).items():
            expected = expected.index_select(dim, positions)
        assert torch.equal(p.grad, expected)
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    assert all(p.grad.shape == p.shape for p in model.parameters())
    assert loss.requires_grad


def test_what_cannot_follow_is_refused_before_anything_changes():
    model, (x, _) = network(), batches()[0]
    groups = find_groups(model, x)
    kept, before = halves(groups), deepcopy(model.state_dict())
    stranger = network()

    class Odd(torch.optim.SGD):
        pass

    odd = Odd(model.parameters(), 0.1)
    odd.state[model[0].weight]["history"] = torch.zeros(7, 3)
    for given, message in [
        ({"optimizer": torch.optim.LBFGS(model.parameters())}, "LBFGS keeps a history"),
        ({"optimizer": torch.optim.SGD(stranger.parameters(), 0.1)}, "trains another network"),
        ({"optimizer": odd}, r"Odd keeps 'history' of shape \(7, 3\)"),
        ({"spam": SpaM(stranger, 16)}, "spam belongs to another network"),
        ({"hold": mask_units(stranger, groups, kept).hold(stranger)}, "held on another network"),
    ]:
        with pytest.raises(ValueError, match=message):
            remove_units(model, groups, kept, x, in_place=True, **given)
        assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
