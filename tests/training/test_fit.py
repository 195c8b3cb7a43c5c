"""What one call of fit does: the loss it minimises, what it records, and what it leaves as it found it."""

import csv
import io
import random
import sys

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from shaver.training import History, Options, fit
from tests.training.problems import batches, blobs, identical, network, weights


def test_map_training_equals_a_handwritten_loop():
    data, ours, reference = batches(), network(), network()
    fit(ours, data, method="map", epochs=3, lr=0.1, options=Options(schedule="constant", weight_decay=1e-2))
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    for _ in range(3):
        for x, y in data:
            optimizer.zero_grad()
            F.cross_entropy(reference(x), y).backward()
            optimizer.step()
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(ours.parameters(), reference.parameters(), strict=True))


def test_map_without_weight_decay_given_has_a_unit_gaussian_prior():
    explicit, default = network(), network()
    fit(explicit, batches(), method="map", epochs=2, options=Options(weight_decay=1 / 96))
    fit(default, batches(), method="map", epochs=2)
    assert identical(weights(explicit), weights(default))


def test_with_spam_weight_decay_is_where_the_prior_starts():
    named, own = network(), network()
    fit(named, batches(), epochs=5, weight_decay=0.01, spam={"temperature": 0.5})
    fit(own, batches(), epochs=5, spam={"temperature": 0.5, "initial_precision": 0.01 * 96 / 0.5})
    assert identical(weights(named), weights(own))


def test_with_spam_a_weight_decay_of_zero_is_none():
    zero, default = network(), network()
    fit(zero, batches(), epochs=2, weight_decay=0)
    fit(default, batches(), epochs=2)
    assert identical(weights(zero), weights(default))


def test_training_learns_and_records_it(tmp_path):
    history = fit(network(), batches(), batches(seed=2), method="map", epochs=15, lr=0.1, folder=tmp_path)
    assert len(history) == 15
    assert history[-1]["loss"] < 0.5 * history[0]["loss"]
    assert history[-1]["valid_accuracy"] > 0.75
    assert history.column("epoch") == list(range(1, 16))
    with open(tmp_path / "history.csv") as file:
        rows = list(csv.DictReader(file))
    assert [float(row["loss"]) for row in rows] == history.column("loss")
    assert set(rows[0]) == {"epoch", "loss", "lr", "valid_loss", "valid_accuracy", "seconds"}


def test_validation_numbers_are_those_of_the_network_in_eval_mode():
    model = network(dropout=0.5)
    x, y = blobs(50, seed=3)
    odd = list(zip(x.split(16), y.split(16), strict=True))  # the last batch has two samples
    history = fit(model, batches(), odd, method="map", epochs=1)
    model.eval()
    with torch.no_grad():
        outputs = model(x)
    assert history[-1]["valid_loss"] == pytest.approx(float(F.cross_entropy(outputs, y)), rel=1e-5)
    assert history[-1]["valid_accuracy"] == int((outputs.argmax(1) == y).sum()) / 50


def test_the_cosine_runs_from_lr_to_a_millionth():
    rates = []

    class Watch(torch.optim.SGD):
        def step(self, closure=None):
            rates.append(self.param_groups[0]["lr"])
            return super().step(closure)

    fit(network(), batches(), method="map", epochs=4, optimizer=lambda p: Watch(p, lr=0.2))
    assert rates[0] == 0.2
    assert rates[-1] == pytest.approx(1e-6)
    assert rates == sorted(rates, reverse=True)
    assert rates[len(rates) // 2] == pytest.approx(0.1, rel=0.1)


def test_a_users_schedule_is_a_function_of_progress():
    seen = []
    fit(network(), batches(), method="map", epochs=2, options=Options(schedule=lambda t: seen.append(t) or 1.0))
    assert seen[0] == 0.0
    assert seen[-1] == 1.0


def test_accumulated_batches_give_the_gradient_of_one_large_batch():
    def plain():
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))  # batch norm sees the batch size

    torch.manual_seed(0)
    small = plain()
    large = plain()
    large.load_state_dict(small.state_dict())
    # 96 = 40 + 40 + 16: uneven, so that a mean of means would differ
    fit(small, batches(40), method="map", epochs=3, options=Options(accumulate=3))
    fit(large, batches(96), method="map", epochs=3)
    assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(small.parameters(), large.parameters(), strict=True))


def test_clipping_bounds_the_gradient_the_optimizer_sees():
    norms = []

    class Watch(torch.optim.SGD):
        def step(self, closure=None):
            grads = [p.grad for g in self.param_groups for p in g["params"]]
            norms.append(float(torch.nn.utils.get_total_norm(grads)))
            return super().step(closure)

    def run(clip):
        norms.clear()
        make = lambda p: Watch(p, lr=0.1)  # noqa: E731
        fit(network(), batches(), method="map", epochs=1, optimizer=make, options=Options(clip=clip))
        return max(norms)

    assert run(None) > 0.2
    assert run(0.1) <= 0.1 * (1 + 1e-5)


@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
def test_mixed_precision_trains(amp):
    options = Options(amp=amp, clip=5.0)
    history = fit(network(), batches(), batches(seed=2), method="map", epochs=10, lr=0.1, options=options)
    assert history[-1]["valid_accuracy"] > 0.7


def test_the_users_random_numbers_mode_and_gradients_are_left_alone():
    model = network().eval()
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    expected = (torch.rand(1), np.random.rand(), random.random())
    torch.manual_seed(5), np.random.seed(5), random.seed(5)
    fit(model, batches(), method="map", epochs=1)
    assert (torch.rand(1), np.random.rand(), random.random()) == expected
    assert not any(module.training for module in model.modules())
    assert all(p.grad is None for p in model.parameters())


def test_a_given_optimizer_keeps_its_learning_rate_for_what_comes_after():
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    fit(model, batches(), method="map", epochs=2, optimizer=optimizer)
    assert optimizer.param_groups[0]["lr"] == 0.01
    assert optimizer.state  # it is the one that was used


def test_the_seed_decides_the_numbers():
    def run(seed):
        x, y = blobs()
        loader = DataLoader(TensorDataset(x, y), batch_size=16, shuffle=True)
        model = network(dropout=0.3)
        fit(model, loader, method="map", epochs=2, seed=seed)
        return weights(model)

    assert identical(run(1), run(1))
    assert not identical(run(1), run(2))


def test_dict_batches_and_own_functions_work():
    as_tuples, as_dicts, as_custom = network(), network(), network()
    fit(as_tuples, batches(), method="map", epochs=1)
    fit(as_dicts, [{"input": x, "labels": y} for x, y in batches()], method="map", epochs=1)
    odd = [{"image": x, "class": y} for x, y in batches()]
    forward, targets = (lambda model, batch: model(batch["image"])), (lambda batch: batch["class"])
    fit(as_custom, odd, method="map", epochs=1, forward=forward, targets=targets)
    assert identical(weights(as_tuples), weights(as_dicts))
    assert identical(weights(as_tuples), weights(as_custom))


def test_regression_minimises_the_squared_error():
    x, _ = blobs()
    y = x @ torch.tensor([1.0, -2.0, 0, 0, 0, 0]).unsqueeze(1)
    model = nn.Linear(6, 1)
    data = list(zip(x.split(16), y.split(16), strict=True))
    history = fit(model, data, data, method="map", epochs=40, lr=0.05, likelihood="regression")
    assert torch.allclose(model.weight[0, :2], torch.tensor([1.0, -2.0]), atol=0.05)
    assert "valid_accuracy" not in history[-1]


def test_a_logger_gets_every_row():
    rows = {}

    class Logger:
        def log(self, row, step):
            rows[step] = row

    history = fit(network(), batches(), method="map", epochs=3, logger=Logger())
    assert rows == {1: history[0], 2: history[1], 3: history[2]}


def test_tensorboard_files_hold_the_history(tmp_path):
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    history = fit(network(), batches(), method="map", epochs=2, folder=tmp_path, logger="tensorboard")
    reader = events.EventAccumulator(str(tmp_path / "tensorboard"))
    reader.Reload()
    assert [e.value for e in reader.Scalars("loss")] == pytest.approx(history.column("loss"))


def test_nothing_is_printed_unless_progress_is_asked_for(capfd):
    fit(network(), batches(), method="map", epochs=1)
    assert capfd.readouterr() == ("", "")
    fit(network(), batches(), method="map", epochs=1, progress=True)
    shown = capfd.readouterr()
    assert shown.out == ""
    assert "epoch 1/1" in shown.err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"method": "mapp"}, "did you mean 'map'"),
        ({"method": "map", "epochs": 0}, "epochs must be an integer of at least 1, not 0"),
        ({"method": "map", "optimizer": "sdg"}, "did you mean 'sgd'"),
        ({"method": "map", "lr": -1.0}, "lr must be a finite number above 0"),
        ({"method": "map", "optimizer": lambda p: torch.optim.SGD(p, lr=0.1), "lr": 0.1}, "set it there"),
        ({"method": "map", "spam": {"prior": "unit"}}, 'method="spam"'),
        ({"method": "map", "logger": "tensorboard"}, "needs a folder"),
        ({"weight_decay": 0.1, "spam": {"initial_precision": 5.0}}, "weight_decay=0.1 sets the initial precision"),
        ({"method": "l1", "l1": -1.0}, "l1 must be a finite number of at least 0"),
        ({"method": "map", "likelihood": "clasification"}, "did you mean 'classification'"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_what_would(change, message):
    with pytest.raises(ValueError, match=message):
        fit(network(), batches(), **change)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "cosin"}, "did you mean 'cosine'"),
        ({"amp": "fp16"}, "unknown amp type"),
        ({"accumulate": 0}, "accumulate must be an integer of at least 1"),
        ({"clip": 0.0}, "clip must be a finite number above 0"),
    ],
)
def test_options_are_checked_when_made(options, message):
    with pytest.raises(ValueError, match=message):
        Options(**options)


def test_data_that_cannot_be_read_twice_or_are_empty_are_refused():
    with pytest.raises(TypeError, match="only once"):
        fit(network(), iter(batches()), method="map")
    with pytest.raises(ValueError, match="train is empty"):
        fit(network(), [], method="map")
    with pytest.raises(ValueError, match="label 7 is out of range"):
        fit(network(), [(torch.randn(4, 6), torch.tensor([0, 1, 2, 7]))], method="map")


def test_a_model_or_optimizer_without_the_right_parameters_is_refused():
    frozen = network().requires_grad_(False)
    with pytest.raises(ValueError, match="no trainable parameters"):
        fit(frozen, batches(), method="map")
    foreign = torch.optim.SGD(network().parameters(), lr=0.1)
    with pytest.raises(ValueError, match="none of the model's"):
        fit(network(), batches(), method="map", optimizer=foreign)


class Terminal(io.StringIO):
    """Standard error as a terminal has it."""

    def isatty(self):
        return True


def test_a_terminal_shows_a_bar_unless_it_is_declined_or_a_logger_is_there(monkeypatch):
    class Logger:
        def log(self, row, step):
            pass

    shown = {}
    for name, settings in {"default": {}, "declined": {"progress": False}, "logged": {"logger": Logger()}}.items():
        terminal = Terminal()
        monkeypatch.setattr(sys, "stderr", terminal)
        fit(network(), batches(), method="map", epochs=1, **settings)
        shown[name] = terminal.getvalue()
    assert "epoch 1/1" in shown["default"]
    assert "left" in shown["default"]
    assert shown["declined"] == shown["logged"] == ""


def test_no_weight_decay_is_a_weight_decay_of_zero():
    zero, own = network(), network()
    fit(zero, batches(), method="map", epochs=2, lr=0.1, weight_decay=0)
    optimizer = torch.optim.SGD(own.parameters(), lr=0.1, momentum=0.9)
    fit(own, batches(), method="map", epochs=2, optimizer=optimizer)
    assert identical(weights(zero), weights(own))


def test_options_by_name_are_options_as_one_object():
    by_name, as_object = network(), network()
    fit(by_name, batches(), method="map", epochs=2, optimizer="adam", clip=0.5, accumulate=2)
    fit(as_object, batches(), method="map", epochs=2, options=Options(optimizer="adam", clip=0.5, accumulate=2))
    assert identical(weights(by_name), weights(as_object))
    with pytest.raises(ValueError, match="unknown argument of fit 'optimiser'; did you mean 'optimizer'"):
        fit(network(), batches(), optimiser="adam")


class InPlace(nn.Module):
    """A network that changes its input in place."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(4, 3)

    def forward(self, x):
        return self.layer(x.mul_(0.5))


@pytest.mark.parametrize("method", ["map", "spam"])
def test_a_network_that_changes_its_input_leaves_the_user_s_batches_alone(method):
    x, y = torch.randn(24, 4), torch.randint(3, (24,))
    data, before = [(x[:12], y[:12]), (x[12:], y[12:])], x.clone()
    fit(InPlace(), data, data, method=method, epochs=2, progress=False)
    assert torch.equal(x, before)


def test_a_printed_history_is_one_line_about_the_last_epoch():
    rows = [{"epoch": e, "loss": 1 / e, "lr": 0.1, "seconds": 2.0} for e in (1, 2)]
    assert str(History(rows)) == "2 epochs in 4 s; the last one: loss 0.5"
    assert str(History()) == "no epochs"


@pytest.mark.parametrize("method", ["spam", "map"])
def test_norm_statistics_fit_the_weights_at_the_end_of_spam(method: str) -> None:
    """The prior moves weights after BatchNorm has averaged its statistics; MAP keeps torch's running average."""
    generator = torch.Generator().manual_seed(0)
    x = 3 + torch.randn(256, 4, generator=generator)
    batches = list(zip(x.split(64), (x.sum(1) > 12).long().split(64), strict=True))
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 2))
    fit(model, batches, method=method, epochs=3, lr=0.05, seed=0)
    norm = model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    measured = torch.stack([model[0](part).detach().mean(0) for part in x.split(64)]).mean(0)
    assert torch.allclose(norm.running_mean, measured, rtol=1e-4, atol=1e-4) == (method == "spam")
    assert norm.momentum == 0.1
