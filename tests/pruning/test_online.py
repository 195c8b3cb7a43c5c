"""Online pruning: along the schedule, never back."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shaver
from shaver.criteria import score
from shaver.io import load_state, save_state
from shaver.pruning import Online, OnlinePruner, cubic, linear


def build():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-3)
    return model, optimizer, torch.randn(30, 10), torch.randint(0, 5, (30,))


def epoch(model, optimizer, x, y):
    for _ in range(3):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()


def zeros(model):
    return {n: p.detach() == 0 for n, p in model.named_parameters() if p.ndim > 1}


@pytest.mark.parametrize("schedule", ["linear", "cubic"])
def test_sparsity_follows_the_schedule_and_the_fallen_stay_down(schedule):
    model, optimizer, x, y = build()
    pruner = OnlinePruner(model, optimizer, Online(0.9, schedule=schedule, start=0.2, end=0.8))
    assert pruner.masks is None
    before = zeros(model)
    for step in range(1, 11):
        epoch(model, optimizer, x, y)
        report = pruner.update(score(model, "random", seed=step), step / 10)  # scores that change their mind
        t = min(1, max(0, (step / 10 - 0.2) / 0.6))
        expected = 0.9 * (t if schedule == "linear" else 1 - (1 - t) ** 3)
        assert report.achieved == pytest.approx(expected, abs=0.5 / 300)
        epoch(model, optimizer, x, y)
        now = zeros(model)
        assert all(bool((now[n] | ~before[n]).all()) for n in now)
        assert all(torch.equal(now[n], ~pruner.masks[n]) for n in now)
        before = now
    assert pruner.masks.sparsity == pytest.approx(0.9)


def test_an_earlier_progress_does_not_bring_weights_back():
    model, optimizer, _, _ = build()
    pruner = OnlinePruner(model, optimizer, Online(0.8, start=0.0))
    pruner.update(score(model, "magnitude"), 0.5)
    masks = pruner.masks
    pruner.update(score(model, "random"), 0.1)
    assert all(torch.equal(masks[n], pruner.masks[n]) for n in masks)


def test_the_schedules_run_from_nothing_to_all():
    for schedule in (linear, cubic):
        assert (schedule(0.0), schedule(1.0)) == (0.0, 1.0)
    assert cubic(0.5) == 0.875
    late = Online(0.8, schedule=lambda t: t**2, start=0.0, end=1.0)
    assert late.sparsity_at(0.5) == pytest.approx(0.2)


def test_limits_per_layer_hold_online():
    model, optimizer, x, y = build()
    pruner = OnlinePruner(model, optimizer, Online(0.9, start=0.0, minimum=12))
    for step in range(1, 6):
        epoch(model, optimizer, x, y)
        report = pruner.update(score(model, "magnitude"), step / 5)
    assert min(layer.kept for layer in report.layers) >= 12
    assert report.achieved == pytest.approx(0.9, abs=0.002)


def test_biases_are_ranked_with_the_weights_and_stay_removed():
    model, optimizer, x, y = build()
    schedule = Online(0.8, criterion="magnitude", start=0.0, biases=True)
    pruner = OnlinePruner(model, optimizer, schedule)
    with torch.no_grad():
        model[0].bias[:15], model[2].bias[:] = 1e-6, 5.0
    pruner.after_epoch(1.0)
    masks = pruner.masks
    assert (masks.total, masks.kept) == (325, 65)  # 80 % of weights and biases together
    assert not bool(masks["0.bias"][:15].any())
    assert bool(masks["2.bias"].all())
    epoch(model, optimizer, x, y)
    assert not bool(model[0].bias[:15].any())
    without = OnlinePruner(model, optimizer, Online(0.8, criterion="magnitude", start=0.0))
    without.after_epoch(1.0)
    assert set(without.masks) == {"0.weight", "2.weight"}


def test_a_target_out_of_reach_is_said_at_the_first_update():
    model, optimizer, _, _ = build()
    pruner = OnlinePruner(model, optimizer, Online(0.99, start=0.0, minimum=10))
    with pytest.raises(ValueError, match=r"sparsity of 0\.99 is out of reach"):
        pruner.update(score(model, "magnitude"), 0.01)
    assert pruner.masks is None


def test_a_checkpoint_restores_the_masks(tmp_path):
    model, optimizer, x, y = build()
    pruner = OnlinePruner(model, optimizer, Online(0.9, start=0.0))
    pruner.update(score(model, "magnitude"), 0.3)
    save_state(tmp_path / "pruner.safetensors", pruner.state_dict())
    other, other_optimizer, _, _ = build()
    resumed = OnlinePruner(other, other_optimizer, Online(0.9, start=0.0))
    resumed.load_state_dict(load_state(tmp_path / "pruner.safetensors"))
    epoch(other, other_optimizer, x, y)
    assert all(torch.equal(z, ~pruner.masks[n]) for n, z in zeros(other).items())
    fresh = OnlinePruner(other, other_optimizer, Online(0.9, start=0.0))
    fresh.load_state_dict(OnlinePruner(other, other_optimizer, Online(0.9, start=0.0)).state_dict())
    assert fresh.masks is None


def test_release_lets_weights_grow_again():
    model, optimizer, x, y = build()
    pruner = OnlinePruner(model, optimizer, Online(0.9, start=0.0))
    pruner.update(score(model, "magnitude"), 1.0)
    pruner.release()
    epoch(model, optimizer, x, y)
    assert any(bool((~zeros(model)[n] & ~pruner.masks[n]).any()) for n in pruner.masks)


def test_bad_arguments_leave_everything_as_it_is():
    model, optimizer, _, _ = build()
    for options, message in [
        ({"sparsity": 99}, "99 % is 0.99"),
        ({"sparsity": 0.9, "start": 0.7, "end": 0.6}, "start < end"),
        ({"sparsity": 0.9, "schedule": "cubik"}, "did you mean 'cubic'"),
        ({"sparsity": 0.9, "scope": "2:4"}, "unknown scope"),
        ({"sparsity": "auto", "criterion": "magnitude"}, "the evidence decides"),
        ({"sparsity": 0.9, "budget": 0.1}, 'needs sparsity="auto"'),
        ({"sparsity": "automatic"}, "the share of weights to remove"),
    ]:
        with pytest.raises(ValueError, match=message):
            Online(**options)
    pruner = OnlinePruner(model, optimizer, Online(0.9, start=0.0))
    scores = score(model, "magnitude")
    pruner.update(scores, 0.3)
    before = zeros(model)
    for bad, progress, message in [
        (scores, 1.5, "progress is"),
        ({n: s * float("nan") for n, s in scores.items()}, 0.5, "NaN"),
        ({"0.weight": scores["0.weight"]}, 0.5, "other parameters"),
        ({"7.weight": scores["0.weight"]}, 0.5, "does not have"),
    ]:
        with pytest.raises(ValueError, match=message):
            pruner.update(bad, progress)
    assert all(torch.equal(before[n], z) for n, z in zeros(model).items())


def test_with_calibration_data_each_update_is_followed_by_a_repair():
    model, optimizer, x, y = build()
    model.double()
    x = x.double()
    pruner = OnlinePruner(model, optimizer, Online(0.8, start=0.0, calibration=(part for part in x.split(10))))
    for progress in (0.2, 0.5):
        epoch(model, optimizer, x, y)
        before = copy.deepcopy(model)
        pruner.update(score(model, "magnitude"), progress)
        plain = copy.deepcopy(before)
        pruner.masks.apply_(plain)
        expected = copy.deepcopy(plain)
        shaver.repair(expected, x.split(10), reference=before, masks=pruner.masks)
        for found, wanted in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(found, wanted)
        errors = [float((net(x) - before(x)).square().mean()) for net in (model, plain)]
        assert errors[0] < 0.8 * errors[1]
        assert model.training
    removed = zeros(model)
    epoch(model, optimizer, x, y)
    assert all(torch.equal(now, removed[name]) for name, now in zeros(model).items())
    values = copy.deepcopy(model.state_dict())
    pruner.update(score(model, "magnitude"), 0.5)  # nothing more is removed
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize("method", ["map", "spam"])
@pytest.mark.parametrize("kind", ["weights", "units"])
def test_training_repairs_weights_and_units(method, kind, tmp_path):
    model, _, x, y = build()
    with pytest.raises(ValueError, match="no calibration batches"):
        Online(0.5, calibration=[])
    given = {"every": 4, "calibration": [(x[:20], y[:20])]}
    online = Online(0.6, **given) if kind == "weights" else shaver.structure.Gradual(0.5, example=x[:2], **given)
    data = list(zip(x.split(10), y.split(10), strict=True))
    history = shaver.fit(model, data, method=method, epochs=6, online=online, folder=tmp_path)
    parameters = dict(model.named_parameters())
    assert history.masks.sparsity > 0.3
    assert all(bool((parameters[name][~mask] == 0).all()) for name, mask in history.masks.items())
    assert all(bool(p.isfinite().all()) for p in model.parameters())
