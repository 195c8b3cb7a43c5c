"""SpaM through fit: the same as in a loop of one's own, with its numbers in the history."""

import math

import pytest
import torch
from torch import nn

from shaver.criteria import score
from shaver.evidence import Posterior
from shaver.repairing import recalibrate
from shaver.settings import PAPER
from shaver.spam import SpaM
from shaver.training import Diverged, Options, fit
from tests.training.problems import batches, blobs, identical, network, weights

QUICK = {"every": 3, "update": 12, "shrink": 0.0, "burn_in": 0.0}


def test_fit_equals_a_loop_of_ones_own():
    ours, reference, data = network(), network(), batches()
    history = fit(ours, data, epochs=5, lr=0.05, seed=4, spam=QUICK, options=Options(schedule="constant"))
    spam = SpaM(reference, 96, total_steps=30, seed=4, loss="mean", **QUICK)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.05, momentum=0.9)
    for _ in range(5):
        for x, y in data:
            optimizer.zero_grad()
            spam.loss(reference(x), y).backward()
            spam.step(optimizer)
    recalibrate(reference, data)  # at the end, for the weights as they are now
    assert spam.updates == 1
    assert identical(weights(ours), weights(reference))
    assert history.posterior.log_evidence == spam.posterior.log_evidence
    assert history[-1]["log_evidence"] == spam.statistics()["log_evidence"]


def test_the_history_and_the_posterior_are_there_for_what_comes_next():
    model = network()
    history = fit(model, batches(), batches(seed=2), epochs=10, lr=0.1, spam=QUICK)
    for name in ("log_evidence", "effective_parameters", "relevant", "mean_log_delta"):
        assert math.isfinite(history[-1][name]), name
    assert history[-1]["mean_log_delta"] != 0.0, "δ has not been learned"
    assert isinstance(history.posterior, Posterior)
    assert set(score(model, "opd", posterior=history.posterior)) == {"0.weight", "4.weight"}


def test_no_hooks_are_left_on_the_model():
    model = network()
    fit(model, batches(), epochs=2, spam=QUICK)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_the_papers_way_estimates_the_curvature_after_each_epoch(structure):
    history = fit(network(), batches(), epochs=3, spam={"settings": PAPER, "structure": structure})
    assert history.posterior.curvature.structure == structure
    assert history.posterior.curvature.source == "ggn"
    assert all("log_evidence" in row for row in history)


def test_own_batches_reach_the_estimate_too():
    odd = [{"image": x, "class": y} for x, y in batches()]
    forward, targets = (lambda model, batch: model(batch["image"])), (lambda batch: batch["class"])
    settings = {"epochs": 2, "spam": {"settings": PAPER}}
    plain, custom = network(), network()
    fit(plain, batches(), **settings)
    fit(custom, odd, forward=forward, targets=targets, **settings)
    for a, b in zip(plain.parameters(), custom.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


@pytest.mark.parametrize("seed", [0, 4, 9])  # two of them made the paper's way diverge
@pytest.mark.parametrize("online", [True, False])
def test_regression_learns_its_noise(online, seed):
    torch.manual_seed(seed)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 6, generator=generator)
    y = x[:, :1] - 2 * x[:, 1:2] + 0.5 * torch.randn(400, 1, generator=generator)
    data = list(zip(x.split(40), y.split(40), strict=True))
    spam = {"prior": "layer"} | (QUICK if online else {"settings": PAPER, "method": "fixed_point"})
    history = fit(nn.Sequential(nn.Linear(6, 1)), data, likelihood="regression", epochs=30, lr=0.01, spam=spam)
    inputs = torch.cat([x, torch.ones(400, 1)], 1)
    squares = (inputs @ torch.linalg.lstsq(inputs, y).solution - y).square().sum()
    # What least squares finds in this draw; the online average remembers part of the data only.
    assert history[-1]["noise"] == pytest.approx(float(squares) / 393, rel=0.3)


def test_training_stops_when_the_evidence_does_not_rise(monkeypatch, tmp_path):
    evidence = iter([-10.0, -5.0, -6.0, -5.5, -7.0, -1.0])
    real = SpaM.statistics
    monkeypatch.setattr(SpaM, "statistics", lambda self: real(self) | {"log_evidence": next(evidence)})
    options = Options(early_stopping=3)
    history = fit(network(), batches(), epochs=20, spam=QUICK, options=options, folder=tmp_path)
    assert history.column("log_evidence") == [-10.0, -5.0, -6.0, -5.5, -7.0]


def test_accumulation_gives_the_step_of_one_large_batch():
    def plain(seed=0):
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    small, large = plain(), plain()
    settings = {"epochs": 6, "spam": {"source": "ef", "every": 1, "update": 2, "shrink": 0.0}}
    parts = fit(small, batches(40), options=Options(accumulate=3), **settings)
    whole = fit(large, batches(96), **settings)
    assert parts[-1]["mean_log_delta"] != 0.0
    assert parts[-1]["mean_log_delta"] == pytest.approx(whole[-1]["mean_log_delta"], rel=1e-3)
    assert all(torch.allclose(a, b, atol=1e-4) for a, b in zip(small.parameters(), large.parameters(), strict=True))


def test_accumulation_is_refused_where_the_loss_cannot_be_read():
    data = [(x, y.float().unsqueeze(1)) for x, y in batches()]
    with pytest.raises(ValueError, match="larger batch_size"):
        fit(nn.Linear(6, 1), data, likelihood="regression", options=Options(accumulate=2))


@pytest.mark.parametrize("amp", ["bfloat16", "float16"])
def test_mixed_precision_learns_the_prior_too(amp):
    x, y = blobs()
    data = list(zip(x.split(16), y.split(16), strict=True))
    history = fit(network(), data, epochs=8, lr=0.05, spam=QUICK, options=Options(amp=amp, clip=1.0))
    full = fit(network(), data, epochs=8, lr=0.05, spam=QUICK, options=Options(clip=1.0))
    assert history[-1]["mean_log_delta"] == pytest.approx(full[-1]["mean_log_delta"], abs=0.5)
    assert history[-1]["loss"] == pytest.approx(full[-1]["loss"], abs=0.1)


def test_precisions_that_explode_end_training_by_name(monkeypatch, tmp_path):
    real = SpaM.step

    def explode(self, *optimizers, scaler=None):
        if self.steps == 15:
            raise FloatingPointError(
                "the prior precision of 'parameter:0.weight' is not positive and finite everywhere."
            )
        real(self, *optimizers, scaler=scaler)

    monkeypatch.setattr(SpaM, "step", explode)
    with pytest.raises(Diverged, match=r"epoch 3, step 16: the prior precision of .*the state after epoch 2"):
        fit(network(), batches(), epochs=5, spam=QUICK, folder=tmp_path)
    assert (tmp_path / "checkpoint-00002.safetensors").exists()


def test_settings_that_fit_gives_itself_are_refused():
    with pytest.raises(ValueError, match="gives SpaM total_steps itself"):
        fit(network(), batches(), spam={"total_steps": 3})
    with pytest.raises(ValueError, match="did you mean 'shrink'"):
        fit(network(), batches(), spam={"shrnk": 0.5})


def test_a_finished_run_has_its_posterior_back(tmp_path):
    model, again = network(), network()
    first = fit(model, batches(), epochs=3, spam=QUICK, folder=tmp_path)
    second = fit(again, batches(), epochs=3, spam=QUICK, folder=tmp_path)
    assert second.posterior.log_evidence == first.posterior.log_evidence


class Pair(nn.Module):
    """Returns its outputs beside something else."""

    def __init__(self):
        super().__init__()
        self.net = network()

    def forward(self, x):
        return x, self.net(x)


def test_a_forward_of_ones_own_tells_spam_where_the_outputs_are():
    ours, reference = Pair(), network()
    fit(ours, batches(), epochs=3, seed=4, spam=QUICK, forward=lambda model, batch: model(batch[0])[1])
    fit(reference, batches(), epochs=3, seed=4, spam=QUICK)
    assert identical(weights(ours.net), weights(reference))
    with pytest.raises(TypeError, match=r'pass spam=\{"outputs"'):
        fit(Pair(), batches(), epochs=1, spam=QUICK, forward=lambda model, batch: model(batch[0])[1] * 2)


class Undecided(nn.Module):
    """Returns its features too, but only in training."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(6, 5), nn.Linear(5, 3)

    def forward(self, x):
        features = torch.tanh(self.first(x))
        return (features, self.last(features)) if self.training else self.last(features)


def test_outputs_that_are_elsewhere_in_training_are_not_mistaken():
    def forward(model, batch):
        result = model(batch[0])
        return result[1] if model.training else result

    with pytest.raises(TypeError, match="returned a tuple"):
        fit(Undecided(), batches(), epochs=1, spam=QUICK, forward=forward)


def test_by_epochs_any_forward_will_do():
    history = fit(
        Pair(), batches(), epochs=2, spam={"structure": "kron"}, forward=lambda model, batch: model(batch[0])[1] * 2
    )
    assert history.posterior is not None


def test_looking_for_the_outputs_does_not_change_the_order_of_the_data():
    x, y = blobs()
    weights_of = []
    for forward in (None, lambda model, batch: model(batch[0])):
        loader = torch.utils.data.DataLoader(
            torch.utils.data.TensorDataset(x, y), 16, shuffle=True, generator=torch.Generator().manual_seed(5)
        )
        model = network()
        fit(model, loader, epochs=2, spam=QUICK, **({} if forward is None else {"forward": forward}))
        weights_of.append(weights(model))
    assert identical(*weights_of)
