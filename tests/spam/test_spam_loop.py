"""SpaM in a training loop: what a step does, when δ is learned, and what is kept."""

import math
from contextlib import nullcontext
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shaver.curvature import estimate
from shaver.curvature.blocks import Curvature, DiagonalBlock
from shaver.evidence import log_evidence, optimal_precision
from shaver.settings import FINE_TUNING, LOG_BOUNDS, PAPER, Settings
from shaver.spam import SpaM
from tests.spam.toys import QUICK, N, assert_close, blobs, conv, images, mlp, sgd, split, train, weights

PRIORS = ["scalar", "layer", "unit", "parameter"]


def never(**options: Any) -> dict[str, Any]:
    """Settings under which δ is not learned within a test."""
    return {"total_steps": 10**6, "burn_in": 0.5, "every": 3} | options


# Before the first update: MAP ------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["ef", "mc"])
@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_without_an_update_it_is_map_with_a_proximal_weight_decay(source: str, temperature: float):
    model, by_hand = mlp(), mlp()
    spam = SpaM(model, N, initial_precision=5.0, source=source, temperature=temperature, **never())
    train(model, spam, sgd(model), split(blobs()), 3)
    optimizer = sgd(by_hand)
    for _ in range(3):
        for x, y in split(blobs()):
            optimizer.zero_grad()
            F.cross_entropy(by_hand(x), y).backward()
            optimizer.step()
            with torch.no_grad():
                for p in by_hand.parameters():
                    p /= 1 + 0.1 / (1 - 0.9) * 5.0 * temperature / N
    assert_close(weights(model), weights(by_hand))
    assert spam.updates == 0
    assert all((delta == 5).all() for delta in spam.prior.delta().values())


def test_as_a_gradient_it_is_the_weight_decay_of_torch():
    model, by_hand = mlp(), mlp()
    train(model, SpaM(model, N, initial_precision=5.0, proximal=False, **never()), sgd(model), split(blobs()), 3)
    optimizer = sgd(by_hand, weight_decay=5.0 / N)
    for x, y in split(blobs()) * 3:
        optimizer.zero_grad()
        F.cross_entropy(by_hand(x), y).backward()
        optimizer.step()
    assert_close(weights(model), weights(by_hand))


@pytest.mark.parametrize("proximal", [True, False])
def test_the_prior_keeps_its_place_beside_a_sum(proximal: bool):
    """A loss that is B times as large with a learning rate B times as small is the same training."""
    models = [mlp(), mlp()]
    for model, reduction, lr in zip(models, ("mean", "sum"), (0.1, 0.1 / 16), strict=True):
        spam = SpaM(model, N, initial_precision=5.0, proximal=proximal, **never())
        optimizer = sgd(model, lr)
        for x, y in split(blobs()):
            optimizer.zero_grad()
            F.cross_entropy(model(x), y, reduction=reduction).backward()
            spam.step(optimizer)
    assert_close(weights(models[1]), weights(models[0]), 1e-7)


@pytest.mark.parametrize("source", ["ef", "mc"])
def test_accumulated_gradients_are_one_larger_batch(source: str):
    models, found = [mlp(), mlp()], []
    for model, parts in zip(models, (1, 4), strict=True):
        spam = SpaM(model, N, source=source, **QUICK)
        optimizer = sgd(model)
        for x, y in split(blobs(), 32) * 3:
            optimizer.zero_grad()
            for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True):
                (F.cross_entropy(model(a), b) / parts).backward()
            spam.step(optimizer)
        assert spam.updates == 3
        found.append(spam.prior.delta())
    if source == "ef":  # MC draws its labels in another order
        assert_close(weights(models[1]), weights(models[0]), 1e-7)
        assert_close(found[1], found[0], 1e-6)


def test_two_optimizers_are_one_with_two_groups():
    one, two = mlp(), mlp()
    spams = [SpaM(model, N, source="ef", **QUICK) for model in (one, two)]
    both = torch.optim.SGD([{"params": one[0].parameters(), "lr": 0.2}, {"params": one[2].parameters()}], lr=0.05)
    first, second = torch.optim.SGD(two[0].parameters(), lr=0.2), torch.optim.SGD(two[2].parameters(), lr=0.05)
    for x, y in split(blobs()) * 2:
        for model in (one, two):
            model.zero_grad()
            F.cross_entropy(model(x), y).backward()
        spams[0].step(both)
        spams[1].step(first, second)
    assert spams[1].updates == spams[0].updates == 4
    assert_close(weights(two), weights(one))
    assert_close(spams[1].prior.delta(), spams[0].prior.delta())


def test_a_step_without_a_pass_still_applies_the_prior():
    model = mlp()
    spam = SpaM(model, N, **QUICK)
    before = weights(model)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    for step in range(1, 7):
        expected = pytest.warns(UserWarning, match="δ is not learned: no training step") if step == 3 else nullcontext()
        with expected:  # when δ would be updated for the first time
            spam.step(sgd(model))
    assert spam.updates == 0
    assert_close(weights(model), {name: w / (1 + 1 / N) ** 6 for name, w in before.items()})
    assert spam.statistics() == {}
    with pytest.raises(RuntimeError, match="no training step has been measured"):
        _ = spam.posterior


# When δ is learned -----------------------------------------------------------------------------------------------


def updates(total: int | None, steps: int, **options: Any) -> list[int]:
    """The steps at which δ was updated."""
    model = mlp()
    spam = SpaM(model, N, total_steps=total, every=1, update=4, **options)
    spam.watch.has_settled = True
    (x, y), *_ = split(blobs(), 8)
    optimizer, found = sgd(model, 0.01), []
    for step in range(1, steps + 1):
        before = spam.updates
        train(model, spam, optimizer, [(x, y)])
        if spam.updates > before:
            found.append(step)
    return found


def test_delta_is_learned_between_burn_in_and_freeze():
    assert updates(50, 50, burn_in=0.2, freeze=0.6) == [12, 16, 20, 24, 28]
    assert updates(48, 48, burn_in=0.25, freeze=0.5) == [16, 20, 24], "after step 12 and until step 24"
    assert updates(50, 50, burn_in=0.0, freeze=1.0) == list(range(4, 51, 4))
    assert updates(None, 14) == [4, 8, 12], "without total_steps there is neither"
    assert updates(50, 50) == list(range(4, 31, 4)), "the loss has settled: from the first step to 60 %"
    assert updates(50, 50, debias=False) == list(range(4, 36, 4)), "to 70 %, if the weights keep the learned prior"


def test_a_long_training_learns_delta_between_a_third_and_70_percent():
    """In fewer steps the loss decides, and the weights have more time after the freeze."""

    def times(steps: int, **options: Any) -> tuple[float | None, float]:
        settings = SpaM(mlp(), N, total_steps=steps, **options).settings
        return settings.burn_in, settings.freeze

    assert times(5000) == (1 / 3, 0.7)
    assert times(4999) == (None, 0.6)
    assert times(5000, freeze=0.4) == (0.2, 0.4), "half of the time before an earlier freeze"
    assert times(5000, burn_in=0.1, freeze=0.5) == (0.1, 0.5)
    assert times(5000, debias=False) == times(5000, prior="unit") == (None, 0.7), "weights keep the learned prior"
    spam = SpaM(mlp(), N, total_steps=6000)
    spam.watch.has_settled = True
    spam.timetable.steps = 2000
    assert not spam.timetable.is_due, "the loss does not decide"
    spam.timetable.steps = 2050
    assert spam.timetable.is_due


def test_with_a_length_the_first_update_waits_for_the_loss_to_settle_but_not_for_long():
    """One batch again and again: its loss only falls, and never by less than its noise, which is none."""
    model, (batch, *_) = mlp(), split(blobs(), 8)
    spam, optimizer = SpaM(model, N, total_steps=80, every=1, update=4, freeze=0.8), sgd(model, 1e-3)
    for _ in range(36):  # 4/7 · 0.8 · 80 = 36.6 steps
        train(model, spam, optimizer, [batch])
    assert not spam.updates
    for _ in range(8):
        train(model, spam, optimizer, [batch])
    assert spam.updates == 2
    assert not spam.watch.has_settled


def test_a_delta_that_weights_share_is_learned_after_a_tenth_of_the_training_at_the_latest():
    """One batch again and again, as above: its loss never settles."""
    model, (batch, *_) = mlp(), split(blobs(), 8)
    spam, optimizer = SpaM(model, N, prior="unit", total_steps=400, every=1, update=4), sgd(model, 1e-3)
    for _ in range(40):
        train(model, spam, optimizer, [batch])
    assert not spam.updates
    for _ in range(4):
        train(model, spam, optimizer, [batch])
    assert spam.updates == 1


def test_without_a_length_the_first_update_waits_for_the_loss_to_settle():
    """One batch again and again: its loss only falls, and never by less than its noise, which is none."""
    model, (batch, *_) = mlp(), split(blobs(), 8)
    spam, optimizer = SpaM(model, N, every=1, update=4), sgd(model, 1e-3)
    for _ in range(40):
        train(model, spam, optimizer, [batch])
    assert not spam.updates
    for _ in range(68):
        train(model, spam, optimizer, [batch])
    assert spam.updates == 3, "a hundred losses are enough"
    assert not spam.watch.has_settled


@pytest.mark.parametrize("by_hand", [True, False])
def test_delta_stays_as_it_is_after_the_freeze(by_hand: bool):
    model = mlp()
    spam = SpaM(model, N, **QUICK) if by_hand else SpaM(model, N, total_steps=40, freeze=0.5, **QUICK)
    optimizer, batches = sgd(model), split(blobs())
    train(model, spam, optimizer, batches, 4)  # 24 steps
    if by_hand:
        spam.freeze()
    frozen, at = spam.prior.delta(), weights(model)
    train(model, spam, optimizer, batches, 2)
    assert_close(spam.prior.delta(), frozen, 0.0)
    assert any(not torch.equal(w, at[name]) for name, w in weights(model).items()), "the weights go on"


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_by_epochs_delta_is_learned_after_the_burn_in_every_so_often(structure: str):
    model, found = mlp(), []
    spam = SpaM(model, N, structure=structure, online=False, source="ggn", burn_in=2, frequency=3)
    for epoch in range(1, 10):
        before = spam.updates
        spam.end_epoch(split(blobs()))
        if spam.updates > before:
            found.append(epoch)
    assert found == [3, 6, 9]


def test_by_epochs_it_freezes_too():
    model = mlp()
    spam = SpaM(model, N, structure="kron", total_steps=24, freeze=0.5)
    for _ in range(4):
        train(model, spam, sgd(model), split(blobs()))
        spam.end_epoch(split(blobs()))
    assert spam.updates == 2


def test_online_the_end_of_an_epoch_is_nothing_special():
    model = mlp()
    spam = SpaM(model, N)
    spam.end_epoch(iter(()))
    assert (spam.timetable.epochs, spam.updates) == (1, 0)


# What an update does ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shrink", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_an_update_finds_the_best_delta_and_moves_the_weights_along(shrink: float, temperature: float, monkeypatch):
    """With a learning rate of 0 only the shrink moves weights, and the whole data set in a batch makes H exact."""
    monkeypatch.setattr("shaver.watch.restore_vanishing", lambda *_: {})  # some draws would remove the last layer
    model, (x, y) = mlp(), blobs()
    spam = SpaM(
        model,
        N,
        source="ef",
        every=1,
        decay=0.0,
        update=1,
        burn_in=0,
        shrink=shrink,
        temperature=temperature,
    )
    optimizer = sgd(model, 0.0)
    delta = {name: torch.ones_like(p) for name, p in model.named_parameters()}
    for step in range(3):
        with torch.no_grad():
            for p in model.parameters():
                p *= 0.7  # as training might: the best δ rises
        theta = weights(model)
        h = estimate(model, [(x, y)], source="ef").diagonal()
        train(model, spam, optimizer, [(x, y)])
        low, high = (math.exp(bound) for bound in LOG_BOUNDS)
        best = {name: optimal_precision(h[name] / temperature, theta[name]).clamp(low, high) for name in theta}
        assert_close(spam.prior.delta(), best, 1e-8)
        if step:  # the first δ says nothing about where the weights came from
            for name in theta:
                ratio = (h[name] / temperature + delta[name]) / (h[name] / temperature + best[name])
                move = theta[name] * (ratio.clamp(max=1) ** spam.settings.share(1) - 1)
                if move.ndim > 1 and move.norm() > 0.1 * theta[name].norm():  # no matrix moves further
                    move *= 0.1 * theta[name].norm() / move.norm()
                theta[name] += move
        assert_close(weights(model), theta, 1e-8)
        delta = best
    assert spam.updates == 3


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_an_update_does_not_move_an_embedding_table(kind: type[nn.Module]):
    """With a learning rate of 0 only the shrink moves weights. Most rows of the table are not in a batch."""
    table = kind(50, 4)
    pooled = nn.Flatten() if kind is nn.Embedding else nn.Identity()
    model = nn.Sequential(table, pooled, nn.Linear(8 if kind is nn.Embedding else 4, 3))
    spam = SpaM(model, N, source="ef", every=1, update=1, burn_in=0)
    before = weights(model)
    for seed in range(6):
        words = torch.randint(50, (16, 2), generator=torch.Generator().manual_seed(seed))
        train(model, spam, sgd(model, 0.0), [(words, words[:, 0] % 3)])
    after = weights(model)
    assert spam.updates == 6
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert not torch.equal(after["2.weight"], before["2.weight"])
    assert spam.prior.delta()["0.weight"].std() > 0


@pytest.mark.parametrize("method", ["fixed_point", "gradient"])
@pytest.mark.parametrize("source", ["ef", "mc"])
@pytest.mark.parametrize("prior", PRIORS)
def test_every_prior_is_learned_online(prior: str, source: str, method: str):
    model = mlp()
    spam = SpaM(model, N, prior=prior, source=source, method=method, **QUICK)
    train(model, spam, sgd(model), split(blobs()), 4)
    assert spam.updates == 8
    learned = spam.posterior.log_evidence
    assert learned > log_evidence(model, spam.curvature, prior_precision=1.0) + 1
    for name, delta in spam.prior.delta().items():
        assert torch.isfinite(delta.log()).all(), name
    assert F.cross_entropy(model(blobs()[0]), blobs()[1]) < 0.9


def test_a_grouping_of_ones_own():
    model = mlp()
    spam = SpaM(model, N, prior=lambda name, p: name.split(".")[0], **QUICK)
    train(model, spam, sgd(model), split(blobs()), 2)
    delta = spam.prior.delta()
    assert delta["0.weight"] == delta["0.bias"] != delta["2.weight"] == delta["2.bias"]


@pytest.mark.parametrize("settings", [None, PAPER], ids=["default", "paper"])
@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("prior", PRIORS)
def test_every_prior_and_structure_by_epochs(prior: str, structure: str, settings: Settings | None):
    model, batches = conv(), split(images(), 8)
    options = {} if settings or structure == "kron" else {"online": False}
    spam = SpaM(model, 24, prior=prior, structure=structure, settings=settings, **options)
    for _ in range(3):
        train(model, spam, sgd(model, 0.02), batches)
        spam.end_epoch(batches)
    assert spam.updates == 3
    assert spam.curvature.structure == structure
    assert model.training
    curvature = spam.curvature
    if structure == "kron" and settings is None and prior in ("unit", "parameter"):  # learned from diag(A ⊗ G)
        blocks = {name: DiagonalBlock(h) for name, h in curvature.diagonal().items()}
        curvature = Curvature(blocks, curvature.log_likelihood, 24, "diag", "ggn")
    plain = log_evidence(model, curvature, prior_precision=1.0)
    assert log_evidence(model, curvature, prior_precision=spam.prior) > plain


def test_the_paper_s_settings():
    assert (PAPER.source, PAPER.method, PAPER.online, PAPER.proximal, PAPER.shrink) == (
        "ggn",
        "gradient",
        False,
        False,
        0.0,
    )


# What comes out --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [1.0, 0.2])
def test_the_posterior_s_precision_is_curvature_plus_prior(temperature: float):
    model = mlp()
    spam = SpaM(model, N, temperature=temperature, **QUICK)
    train(model, spam, sgd(model), split(blobs()), 2)
    h, delta = spam.curvature.diagonal(), spam.prior.delta()
    assert_close(spam.posterior.precision(), {name: h[name] / temperature + delta[name] for name in h})


def test_statistics():
    model = mlp()
    spam = SpaM(model, N, prior="layer", **QUICK)
    assert spam.statistics() == {}
    train(model, spam, sgd(model), split(blobs()), 2)
    found = spam.statistics()
    assert set(found) == {"effective_parameters", "relevant", "mean_log_delta", "log_evidence"}
    size = sum(p.numel() for p in model.parameters())
    assert 0 < found["effective_parameters"] < size
    assert 0 < found["relevant"] < 1
    logs = [float(delta.log()) for delta in spam.prior.delta().values()]
    assert found["mean_log_delta"] == pytest.approx(sum(logs) / 4)
    assert found["log_evidence"] == pytest.approx(spam.posterior.log_evidence)


def test_without_a_likelihood_there_is_no_evidence():
    """Label smoothing: H is the model's own, but what the data say is not known."""
    model = mlp()
    spam = SpaM(model, N, loss="mean", **QUICK)
    optimizer = sgd(model)
    for x, y in split(blobs()) * 2:
        optimizer.zero_grad()
        F.cross_entropy(model(x), y, label_smoothing=0.1).backward()
        spam.step(optimizer)
    assert spam.updates == 4
    assert set(spam.statistics()) == {"effective_parameters", "relevant", "mean_log_delta"}


def test_close_takes_the_hooks_off_and_keeps_the_posterior():
    model = mlp()
    before = [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()]
    spam = SpaM(model, N, **QUICK)
    train(model, spam, sgd(model), split(blobs()))
    precision = spam.posterior.precision()
    spam.close()
    assert [(dict(m._forward_hooks), dict(m._forward_pre_hooks)) for m in model.modules()] == before
    assert_close(spam.posterior.precision(), precision, 0.0)


# Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"shrnk": 0.5}, "did you mean 'shrink'"),
        ({"burnin": 0.5}, "did you mean 'burn_in'"),
        ({"prior": "units"}, "did you mean 'unit'"),
        ({"structure": "diagonal"}, "did you mean 'diag'"),
        ({"source": "ggn"}, "'ggn'"),
        ({"method": "adam"}, "'adam'"),
        ({"loss": "average"}, "'average'"),
        ({"online": False, "loss": "sum"}, "by epochs"),
        ({"structure": "kron", "online": True}, "by epochs"),
        ({"shrink": 1.5}, r"shrink.*1\.5"),
        ({"temperature": 0.0}, r"temperature.*0\.0"),
        ({"every": 0}, "every.*0"),
        ({"update": 0}, "update.*0"),
        ({"burn_in": 1.0}, r"burn_in.*1\.0"),
        ({"freeze": 0.0}, r"freeze.*0\.0"),
        ({"initial_precision": 0.0}, r"initial_precision.* 0\.0"),
        ({"data_size": 0}, "data_size.*0"),
        ({"likelihood": "regresion"}, "did you mean 'regression'"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        SpaM(mlp(), **({"data_size": N} | options))


def test_a_step_needs_an_optimizer():
    with pytest.raises(TypeError, match="needs the optimizer"):
        SpaM(mlp(), N).step()


def test_by_epochs_there_is_no_posterior_before_an_estimate():
    spam = SpaM(mlp(), N, structure="kron")
    assert spam.statistics() == {}
    with pytest.raises(RuntimeError, match=r"spam\.end_epoch\(batches\)"):
        _ = spam.posterior


# Debiasing -------------------------------------------------------------------------------------------------------


def test_debiased_weights_train_under_the_initial_precision_and_are_not_shrunk():
    model = mlp()
    spam = SpaM(model, N, total_steps=200, initial_precision=3.0, **QUICK)
    train(model, spam, sgd(model), split(blobs()), 3)
    spam.debias()
    used = spam.delta_by_parameter()
    assert all(bool((used[p] == 3.0).all()) for p in model.parameters())
    before, learned = weights(model), spam.prior.delta()
    spam.update(split(blobs()))
    assert_close(weights(model), before, 0.0)
    delta = spam.prior.delta()
    assert any(not torch.equal(delta[name], learned[name]) for name in delta), "δ is still learned"
    assert not bool((delta["0.weight"] == 3.0).any())
    again = SpaM(model, N, total_steps=200, initial_precision=3.0, **QUICK)
    again.load_state_dict(spam.state_dict())
    assert bool((again.delta_by_parameter()[model[0].weight] == 3.0).all())


@pytest.mark.parametrize("by_hand", [True, False])
@pytest.mark.parametrize("debias", [True, False])
def test_at_the_freeze_the_weights_leave_the_learned_prior(by_hand: bool, debias: bool):
    model = mlp()
    length = {} if by_hand else {"total_steps": 40, "freeze": 0.5}
    spam = SpaM(model, N, initial_precision=3.0, debias=debias, **length, **QUICK)
    optimizer, batches = sgd(model), split(blobs())
    train(model, spam, optimizer, batches, 3)  # 18 steps
    assert not bool((spam.delta_by_parameter()[model[0].weight] == 3.0).any())
    if by_hand:
        spam.freeze()
    train(model, spam, optimizer, batches)
    assert bool((spam.delta_by_parameter()[model[0].weight] == 3.0).all()) == debias


def test_the_posterior_of_debiased_weights_has_the_best_delta_at_the_weights():
    model = mlp()
    spam = SpaM(model, N, total_steps=24, freeze=0.5, debias=True, **QUICK)
    train(model, spam, sgd(model), split(blobs()), 4)
    frozen, posterior = spam.prior.delta(), spam.posterior
    h = spam.curvature.diagonal()
    low, high = (math.exp(bound) for bound in LOG_BOUNDS)
    for name, weight in weights(model).items():
        best = optimal_precision(h[name] / spam.temperature, weight).clamp(low, high)
        torch.testing.assert_close(posterior.delta_of(name), best)
        assert not torch.equal(frozen[name], best)
    at_frozen = log_evidence(model, spam.curvature, prior_precision=frozen, temperature=spam.temperature)
    assert posterior.log_evidence >= at_frozen
    assert_close(spam.prior.delta(), frozen, 0.0)


def test_by_default_the_weights_leave_the_learned_prior_where_each_has_its_own():
    def debiases(fall: float = 0.5, **options: Any) -> bool:
        model = mlp()
        spam = SpaM(model, **({"data_size": N, "total_steps": 20, "freeze": 0.5} | QUICK | options))
        optimizer = sgd(model)
        train(model, spam, optimizer, split(blobs()), 2)
        optimizer.param_groups[0]["lr"] *= fall
        train(model, spam, optimizer, split(blobs()))
        return bool((spam.delta_by_parameter()[model[0].weight] == 1.0).all())

    assert debiases()
    assert debiases(temperature=0.5)
    assert not debiases(fall=0.6), "the learning rate is high"
    assert debiases(fall=0.6, debias=True)
    assert not debiases(prior="unit")
    assert not debiases(likelihood="regression", loss="mean")
    assert not debiases(settings=FINE_TUNING, update=3, burn_in=0.0)
    assert not debiases(freeze=1.0)


@pytest.mark.parametrize("how", ["step", "attached", "one by one"])
def test_weights_leave_the_learned_prior_when_every_learning_rate_has_fallen(how: str):
    """Also if the training was resumed after the highest learning rate, and several optimizers have their own."""
    model, batches = mlp(), split(blobs())
    optimizers = [sgd(model[0]), torch.optim.Adam(model[2].parameters(), lr=0.001)]
    spam = SpaM(model, N, total_steps=1000, freeze=0.001, update=1, every=1)
    if how == "attached":
        spam.attach(*optimizers)

    def used() -> float:
        """The first δ after another step."""
        F.cross_entropy(model(batches[0][0]), batches[0][1]).backward()
        if how == "step":
            spam.step(*optimizers)
        else:
            for optimizer in optimizers:
                optimizer.step() if how == "attached" else spam.step(optimizer)
        return float(spam.delta_by_parameter()[model[0].weight].flatten()[0])

    learned = [used() for _ in range(3)][-1]
    assert learned != 1.0
    optimizers[0].param_groups[0]["lr"] *= 0.4
    assert used() == learned
    state = spam.state_dict()
    spam.close()
    spam = SpaM(model, N, total_steps=1000, freeze=0.001, update=1, every=1)
    spam.load_state_dict(state)
    if how == "attached":
        spam.attach(*optimizers)
    optimizers[1].param_groups[0]["lr"] *= 0.4
    assert [used() for _ in range(2)][-1] == 1.0


def test_curvature_is_measured_often_only_where_it_is_needed():
    """Near and during the updates of δ and at the end. The average reaches back 2 / (1 − 0.9) = 20 steps."""
    model = mlp()
    spam = SpaM(model, N, total_steps=600, every=2, update=10, decay=0.9, burn_in=0.1, freeze=0.7)
    batch, optimizer, measured = split(blobs())[0], sgd(model), []
    for step in range(700):
        before = spam.online.measurements
        train(model, spam, optimizer, [batch], 1)
        measured += [step] * (spam.online.measurements - before)

    def gaps(start: int, stop: int) -> set[int]:
        found = [step for step in measured if start <= step < stop]
        return {later - earlier for earlier, later in pairwise(found)}

    assert spam.updates
    assert measured[0] == 0
    assert gaps(40, 420) == gaps(560, 600) == {2}, "around the updates, and at the end"
    assert gaps(0, 40) == gaps(422, 560) == {32}, "before and in between"
    assert gaps(602, 700) == {8}, "beyond the end that was announced"
    assert measured[-1] >= 690
