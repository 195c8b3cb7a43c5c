"""Gradual structured pruning: units fall along a schedule while MAP or SpaM trains, and stay away."""

import pytest
import torch

import shaver
from shaver.pruning import OnlinePruner, cubic
from shaver.structure import ChoiceOptions, Chooser, Gradual, compact_with_report, find_groups, kept_units
from shaver.structure.costs import Costs
from tests.structure.known_groups import cnn, fcn

QUICK = {"every": 2, "update": 4, "burn_in": 0.0}


def data(batches=8):
    """Two of five inputs decide between three classes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(batches, 16, 5, generator=generator)
    y = (x[..., 0] > 0).long() + (x[..., 1] > 0).long()
    return list(zip(x, y, strict=True))


class Watch:
    def __init__(self, model, groups, stop=None):
        self.model, self.groups, self.stop, self.widths = model, groups, stop, []

    def log(self, row, step):
        standing = kept_units(self.groups, {n: p != 0 for n, p in self.model.named_parameters()})
        self.widths.append([int(keep.sum()) for keep in standing.values()])
        if step == self.stop:
            raise KeyboardInterrupt


@pytest.mark.parametrize("method", ["map", "spam"])
def test_units_fall_along_the_schedule_and_never_come_back(method):
    model, groups = fcn()
    watch = Watch(model, groups)
    gradual = Gradual(0.75, example=torch.zeros(2, 5), start=0.2, end=0.8, every=1)
    history = shaver.fit(
        model,
        data(),
        method=method,
        epochs=10,
        lr=0.05,
        online=gradual,
        logger=watch,
        spam=QUICK if method == "spam" else None,
    )
    totals = [sum(widths) for widths in watch.widths]
    assert totals[0] == 20
    assert totals == sorted(totals, reverse=True)
    halfway = 20 - round(20 * 0.75 * cubic((0.5 - 0.2) / 0.6))
    assert totals[4] == halfway
    assert watch.widths[7] == watch.widths[-1] == [2, 3]
    report = compact_with_report(model, torch.randn(4, 5), masks=history.masks)
    assert report.choice.widths == {"0": (8, 2), "2": (12, 3)}
    x = torch.randn(4, 5)
    torch.testing.assert_close(report.model(x), model(x), rtol=1e-5, atol=1e-6)


def test_the_unit_prior_is_the_default_and_learns_on():
    model, groups = fcn()
    gradual = Gradual(0.5, groups=groups, start=0.2, end=0.7, every=1)
    history = shaver.fit(model, data(), epochs=10, lr=0.05, online=gradual, spam=QUICK)
    delta = history.posterior.delta()
    assert all(bool(d.isfinite().all()) and bool((d > 0).all()) for d in delta.values())
    logs = delta["0.weight"].double().log()
    assert float(logs.std()) > 0.1  # learned
    rows, columns = logs.mean(1, keepdim=True), logs.mean(0, keepdim=True)
    torch.testing.assert_close(logs, rows + columns - logs.mean(), rtol=0, atol=1e-4)  # δ = a · b: two vectors
    layer = shaver.fit(fcn()[0], data(), epochs=1, online=gradual, spam=QUICK | {"prior": "layer"}).posterior
    assert layer.delta()["0.weight"].numel() == 1


def test_fallen_units_leave_the_precision_of_the_others_alone():
    """With θ = 0 and H = 0 a weight adds nothing to either sum of the fixed point, for whatever unit shares its δ."""
    from shaver.evidence import improve
    from shaver.priors import make_prior

    torch.manual_seed(0)
    model = torch.nn.Linear(6, 4, bias=False)
    x, y = torch.randn(64, 6), torch.arange(64) % 4
    x[:, 4:] = 0
    with torch.no_grad():
        model.weight[:, 4:] = 0
    small = torch.nn.Linear(4, 4, bias=False)
    with torch.no_grad():
        small.weight.copy_(model.weight[:, :4])
    found = {}
    for name, network, inputs in (("whole", model, x), ("small", small, x[:, :4])):
        theta = dict(network.named_parameters())
        prior = make_prior("unit", theta)
        improve(prior, shaver.curvature.estimate(network, [(inputs, y)]), theta)
        found[name] = prior.delta()["weight"]
    torch.testing.assert_close(found["whole"][:, :4], found["small"], rtol=1e-3, atol=0)


def test_a_target_of_flops_is_reached_while_training():
    model, _ = fcn()
    x = torch.zeros(2, 5)
    gradual = Gradual(0.6, example=x, target="flops", spread="global", every=1)
    history = shaver.fit(model, data(), method="map", epochs=5, online=gradual)
    report = compact_with_report(model, x, masks=history.masks)
    assert 0.6 <= 1 - report.after.flops / report.before.flops < 0.7


@pytest.mark.parametrize("seed", range(3))
def test_many_cuts_by_the_same_scores_end_where_one_does(seed):
    model, groups = cnn()
    how = {"target": "parameters", "spread": "global"}
    gradual = Gradual(0.85, groups=groups, **how)
    pruner = OnlinePruner(model, None, gradual)
    # Channels, dear as they are, fall last: were hidden units to make up for them until then, they would be missed.
    generator = torch.Generator().manual_seed(seed)
    costs = Costs(model, groups, "parameters")
    worth = {"0": 3.0, "5": 1.0}
    scores = {
        name: worth[name] * costs.price(name) * torch.rand(group.units, generator=generator)
        for name, group in groups.items()
    }
    for progress in (0.3, 0.4, 0.5, 0.6, 0.7):
        pruner.update(scores, progress)
    once = Chooser(model, groups, ChoiceOptions(**how)).choose(scores, 0.85).kept
    assert all(torch.equal(pruner.kept[name], once[name]) for name in groups)


def test_a_killed_run_resumes_to_the_same_numbers(tmp_path):
    settings = {"epochs": 6, "lr": 0.05, "spam": QUICK}
    gradual = Gradual(0.5, example=torch.zeros(2, 5), every=1)
    whole, broken, resumed = fcn()[0], fcn()[0], fcn()[0]
    shaver.fit(whole, data(), online=gradual, **settings)
    with pytest.raises(KeyboardInterrupt):
        shaver.fit(broken, data(), online=gradual, folder=tmp_path, logger=Watch(broken, fcn()[1], 3), **settings)
    history = shaver.fit(resumed, data(), online=gradual, folder=tmp_path, **settings)
    assert all(torch.equal(a, b) for a, b in zip(whole.parameters(), resumed.parameters(), strict=True))
    assert history.masks.sparsity > 0
    with pytest.raises(ValueError, match=r"belongs to another run: online\['sparsity'\]"):
        shaver.fit(
            fcn()[0], data(), online=Gradual(0.6, example=torch.zeros(2, 5), every=1), folder=tmp_path, **settings
        )


def test_hooks_are_gone_afterwards():
    model, _ = fcn()
    shaver.fit(model, data(), method="map", epochs=2, online=Gradual(0.5, example=torch.zeros(2, 5)))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert all(not p._post_accumulate_grad_hooks for p in model.parameters())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 80}, "80 % is 0.8"),
        ({"target": "latency"}, 'use "flops"'),
        ({"target": "flopz"}, "did you mean 'flops'"),
        ({"criterion": "snip"}, "needs data"),
        ({"schedule": "cubik"}, "did you mean 'cubic'"),
        ({"start": 0.9}, "0 ≤ start < end"),
        ({"every": 0}, "every must be"),
        ({"example": None}, "needs example="),
        ({"example": None, "groups": fcn()[1], "target": "flops"}, "needs example="),
    ],
)
def test_what_cannot_be_is_refused_at_once(settings, message):
    with pytest.raises(ValueError, match=message):
        Gradual(**({"example": torch.zeros(2, 5)} | settings))


def test_opd_needs_somebody_who_learns():
    model, _ = fcn()
    with pytest.raises(ValueError, match='only method="spam" learns'):
        shaver.fit(model, data(), method="map", online=Gradual(0.5, example=torch.zeros(2, 5), criterion="opd"))


def test_groups_found_are_those_written_by_hand():
    model, groups = fcn()
    found = find_groups(model, torch.randn(2, 5))
    assert {n: g.units for n, g in found.items()} == {n: g.units for n, g in groups.items()}


def test_two_schedules_are_never_taken_for_the_same():
    one, other = (Gradual(sparsity, example=torch.zeros(2, 5)) for sparsity in (0.5, 0.6))
    assert one != other
    assert len({one, other}) == 2
