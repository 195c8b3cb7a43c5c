"""Pruning while training, and training what pruning left: zeros stay zero, and a resumed run has the same ones."""

import copy

import pytest
import torch

import shaver
from shaver.evidence import Posterior
from shaver.io import load_state
from shaver.pruning import Masks, Online, linear, prune
from shaver.settings import PAPER
from shaver.training import Options, fit
from tests.training.problems import batches, identical, network, noisy_forward, weights

QUICK = {"every": 3, "update": 6, "shrink": 0.5, "burn_in": 0.0}
METHODS = [
    {"method": "map"},
    {"method": "map", "optimizer": "adam"},
    {"method": "l1", "l1": 1e-3},
    {"method": "spam", "spam": QUICK},
    {"method": "spam", "spam": {"settings": PAPER}},
    {"method": "spam", "spam": QUICK, "options": Options(amp="float16", accumulate=2)},
]
IDS = ["map", "adam", "l1", "spam", "paper", "float16"]


class Watch:
    """After each epoch: which weights are zero."""

    def __init__(self, model, stop=None):
        self.model, self.stop, self.zeros = model, stop, []

    def log(self, row, step):
        self.zeros.append({n: p.detach() == 0 for n, p in self.model.named_parameters() if p.ndim > 1})
        if step == self.stop:
            raise KeyboardInterrupt


@pytest.mark.parametrize("settings", METHODS, ids=IDS)
def test_sparsity_follows_the_schedule_and_what_has_fallen_stays(settings):
    model = network()
    watch = Watch(model)
    online = Online(0.9, schedule="cubic", every=2, start=0.1, end=0.6)
    history = fit(model, batches(), epochs=10, online=online, logger=watch, **settings)
    reached = history.column("sparsity")
    assert reached == sorted(reached)
    assert 0 < reached[3] < 0.9
    assert reached[6] == reached[-1] == pytest.approx(0.9, abs=0.5 / 108)
    for before, after in zip(watch.zeros, watch.zeros[1:], strict=False):
        assert all(bool((after[n] | ~before[n]).all()) for n in before)
    assert all(bool(watch.zeros[-1][n][~mask].all()) for n, mask in history.masks.items())
    assert history.masks.sparsity == reached[-1]
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
    assert not any(p._post_accumulate_grad_hooks for p in model.parameters())


DEBIASED = {"method": "spam", "spam": QUICK, "online": Online(0.8, every=4, end=0.7, debias=True)}


@pytest.mark.parametrize("settings", [*METHODS, DEBIASED], ids=[*IDS, "debiased"])
@pytest.mark.parametrize("epoch", [1, 3, 5])
def test_an_interrupted_run_continues_with_the_same_masks(tmp_path, settings, epoch):
    settings = {"epochs": 6, "online": Online(0.8, every=4, end=0.7), "forward": noisy_forward} | settings
    whole, broken, continued = network(dropout=0.2), network(dropout=0.2), network(dropout=0.2)
    first = fit(whole, batches(), **settings)
    with pytest.raises(KeyboardInterrupt):
        fit(broken, batches(), folder=tmp_path, logger=Watch(broken, stop=epoch), **settings)
    second = fit(continued, batches(), folder=tmp_path, **settings)
    assert identical(weights(whole), weights(continued))
    assert first.column("sparsity") == second.column("sparsity")
    assert all(torch.equal(first.masks[n], second.masks[n]) for n in first.masks)


def test_by_epochs_there_is_a_cut_after_each_new_estimate_alone():
    # 6 steps an epoch, and every= so large that it never comes: cuts are those after the estimates.
    online = Online(0.6, start=0.0, end=0.6, every=1000, schedule=linear)
    history = fit(network(), batches(), epochs=10, spam={"settings": PAPER}, online=online)
    expected = [0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.6, 0.6, 0.6, 0.6]
    assert history.column("sparsity") == pytest.approx(expected, abs=0.5 / 108)


def test_opd_waits_for_the_first_learned_prior():
    spam = {"every": 3, "update": 6, "burn_in": 0.5}
    history = fit(network(), batches(), epochs=10, spam=spam, online=Online(0.8, start=0.0, every=1))
    assert history.column("sparsity")[:5] == [0.0] * 5
    assert history[5]["sparsity"] > 0
    by_size = fit(
        network(), batches(), epochs=10, spam=spam, online=Online(0.8, criterion="magnitude", start=0.0, every=1)
    )
    assert by_size[0]["sparsity"] > 0


def test_the_evidence_decides_how_much_is_removed():
    """Each cut removes as much as ``prune(…, "auto")`` would at that moment, and what is removed stays removed."""
    wanted, model = [], network()

    class Spy(shaver.SpaM):
        def advance(self, *optimizers):
            before = self.updates
            super().advance(*optimizers)
            if self.updates > before:
                left = copy.deepcopy(self.model)
                wanted.append(prune(left, None, "auto", posterior=self.posterior).achieved)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shaver.training.learner.SpaM", Spy)
        # one update of δ per epoch of six steps, from the first step on until the masks are final
        spam = {"every": 3, "update": 6, "burn_in": 0.0, "freeze": 0.6}
        history = fit(model, batches(), epochs=10, spam=spam, online=Online("auto", start=0.0, end=0.6))
    reached = history.column("sparsity")
    most = [max(wanted[: i + 1]) for i in range(len(wanted))]
    assert len(wanted) == 6
    assert reached[:6] == pytest.approx(most)
    assert 0 < reached[0] < reached[-1] < 1
    assert reached[6:] == reached[5:6] * 4
    assert sum(int((p == 0).sum()) for p in model.parameters() if p.ndim > 1) >= round(reached[-1] * 108)


def test_the_evidence_leads_to_a_target():
    """Until the end never more than the evidence allows or the target; at the end the target."""
    spam = {"every": 3, "update": 6, "burn_in": 0.0, "freeze": 0.6}
    free, low, high = (
        fit(network(), batches(), epochs=10, spam=spam, online=Online(target, schedule="evidence", start=0.0, end=0.6))
        for target in ("auto", 0.01, 0.95)
    )
    evidence = free.column("sparsity")
    assert 1 / 108 < evidence[0] < 0.95
    assert low.column("sparsity") == pytest.approx([round(0.01 * 108) / 108] * 10)
    assert high.column("sparsity")[0] == evidence[0]
    assert high.column("sparsity")[5:] == pytest.approx([0.95] * 5, abs=0.5 / 108)


def test_without_a_learned_prior_the_evidence_removes_nothing():
    history = fit(network(), batches(), epochs=2, spam={"every": 3, "update": 500}, online=Online("auto"))
    assert history.column("sparsity") == [0.0, 0.0]


@pytest.mark.parametrize("debias", [False, True])
def test_debiased_weights_leave_the_learned_prior_at_the_end(debias):
    pulls = []

    class Spy(shaver.SpaM):
        def after_step(self, optimizer, strength):
            pulls.append(torch.cat([d.expand_as(p).flatten() for p, d in self.delta_by_parameter().items()]))
            super().after_step(optimizer, strength)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shaver.training.learner.SpaM", Spy)
        online = Online(0.5, end=0.5, debias=debias)
        history = fit(network(), batches(), epochs=10, spam=QUICK | {"initial_precision": 2.0}, online=online)
    assert len(pulls) == 60
    assert not bool((pulls[29] == 2.0).any())
    assert bool((pulls[-1] == 2.0).all()) == debias
    assert not any(bool((delta == 2.0).any()) for delta in history.posterior.delta().values())


def test_the_target_is_reached_also_where_the_prior_is_never_learned():
    history = fit(network(), batches(), epochs=2, spam={"every": 3, "update": 500}, online=Online(0.8))
    assert history.column("sparsity") == pytest.approx([0.0, 0.8], abs=0.5 / 108)


def test_scores_are_the_posteriors():
    """With OPD, what falls first is what the posterior of that moment ranks lowest."""
    # Twelve steps; δ is updated after the sixth alone (later it is frozen), and there everything falls at once.
    masks = fit(network(), batches(), epochs=2, spam=QUICK, online=Online(0.5, start=0.4, end=0.5)).masks
    dense = network()  # the same training without pruning, up to the step of the cut
    seen = {}

    class Spy(shaver.SpaM):
        def step(self, *optimizers, scaler=None):
            super().step(*optimizers, scaler=scaler)
            if self.updates == 1 and not seen:
                seen.update(shaver.score(self.model, "opd", posterior=self.posterior))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("shaver.training.learner.SpaM", Spy)
        fit(dense, batches(), epochs=2, spam=QUICK)
    fallen = torch.cat([~masks[n].flatten() for n in seen])
    scores = torch.cat([s.flatten() for s in seen.values()])
    assert int(fallen.sum()) == 54
    assert float(scores[fallen].max()) <= float(scores[~fallen].min())


@pytest.mark.parametrize("criterion", shaver.criteria.names())
def test_fine_tuning_holds_the_zeros_of_every_criterion_and_helps(criterion):
    model, data = network(), batches()
    fit(model, data, method="map", epochs=5)
    curvature = shaver.curvature.estimate(model, data)
    posterior = Posterior(curvature, 1.0, dict(model.named_parameters()))
    pruned = prune(model, shaver.score(model, criterion, posterior=posterior, batches=data), 0.8)
    before = shaver.measure.quality(model, data).nll
    history = fit(model, data, method="map", epochs=3, masks=pruned.masks)
    for name, mask in pruned.masks.items():
        assert torch.equal(dict(model.named_parameters())[name].detach() != 0, mask)
    assert shaver.measure.quality(model, data).nll < before
    assert history.column("sparsity") == [pruned.achieved] * 3
    assert history.masks is pruned.masks


def test_fine_tuning_is_resumed_with_its_masks_and_with_no_others(tmp_path):
    masks = prune(network(), shaver.score(network(), "magnitude"), 0.5).masks
    others = prune(network(), shaver.score(network(), "random"), 0.5).masks
    whole, broken, continued = network(), network(), network()
    settings = {"method": "spam", "spam": QUICK | {"debias": False}, "epochs": 5}
    fit(whole, batches(), masks=masks, **settings)
    with pytest.raises(KeyboardInterrupt):
        fit(broken, batches(), masks=masks, folder=tmp_path, logger=Watch(broken, stop=2), **settings)
    untouched = network()
    for wrong in ({"masks": others}, {}, {"online": Online(0.5)}):
        with pytest.raises(ValueError, match=r"belongs to another run: (masks|online)"):
            fit(untouched, batches(), folder=tmp_path, **wrong, **settings)
    assert identical(weights(untouched), weights(network()))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in untouched.modules())
    fit(continued, batches(), masks=masks, folder=tmp_path, **settings)
    assert identical(weights(whole), weights(continued))


def test_what_cannot_be_is_refused_before_anything_changes():
    model = network()
    masks = prune(network(), shaver.score(network(), "magnitude"), 0.5).masks
    for settings, error, message in [
        ({"masks": dict(masks)}, TypeError, r"masks= takes shaver\.pruning\.Masks.*not a dict"),
        ({"masks": Masks({"7.weight": torch.ones(2, dtype=torch.bool)})}, ValueError, r"'7\.weight'"),
        ({"masks": masks, "online": Online(0.5)}, ValueError, "give one of them"),
        ({"online": 0.9}, TypeError, r"takes .*Online\(sparsity, …\) or .*Gradual\(…\), not 0\.9"),
        ({"online": Online(0.5, criterion="opd"), "method": "map"}, ValueError, 'only method="spam" learns'),
        ({"online": Online("auto"), "method": "map"}, ValueError, 'only method="spam" learns'),
        ({"online": Online(0.5), "options": Options(early_stopping=2)}, ValueError, "early_stopping"),
    ]:
        with pytest.raises(error, match=message):
            fit(model, batches(), epochs=1, **settings)
    assert identical(weights(model), weights(network()))
    for settings, message in [
        ({"sparsity": 99}, "99 % is 0.99"),
        ({"sparsity": 0.9, "schedule": "cubik"}, "did you mean 'cubic'"),
        ({"sparsity": 0.9, "criterion": "snip"}, "needs data"),
        ({"sparsity": 0.9, "every": 0}, "every must be"),
    ]:
        with pytest.raises(ValueError, match=message):
            Online(**settings)


def test_a_run_keeps_how_its_zoo_network_is_built_and_its_posterior(tmp_path):
    model = shaver.zoo.build("fcn", seed=0, inputs=6, hidden=[8], classes=3)
    history = fit(model, batches(), epochs=2, spam=QUICK, folder=tmp_path)
    state = load_state(tmp_path / "checkpoint-00002.safetensors")
    twin = shaver.zoo.build(**state["network"])
    twin.load_state_dict(state["model"])
    assert identical(weights(model), weights(twin))
    saved = Posterior.load(tmp_path / "posterior.safetensors")
    assert saved.log_evidence == pytest.approx(history.posterior.log_evidence, rel=1e-6)
    fit(network(), batches(), method="map", epochs=1, folder=tmp_path, resume=False)
    assert not (tmp_path / "posterior.safetensors").exists(), "a posterior of another network was left behind"
    assert load_state(tmp_path / "checkpoint-00001.safetensors")["network"] is None
