"""The register, the errors of ``score``, and the check for a user's own criterion."""

import pytest
import torch
from torch import nn

from shaver import criteria
from shaver.criteria import registry, score
from shaver.testing import check_criterion


@pytest.fixture
def own():
    """Register a criterion for one test only."""
    added = []

    def add(function, **options):
        criteria.criterion("own", **options)(function)
        added.append("own")

    yield add
    for name in set(added):
        del registry._REGISTER[name]


@pytest.mark.parametrize("name", ["grasp", "magnitude", "obd", "opd", "random", "snip", "synflow", "wanda"])
def test_every_criterion_passes_the_public_check(name):
    check_criterion(name)


def test_each_says_what_it_needs():
    table = {name: criteria.needs(name) for name in criteria.names()}
    assert table == {
        "grasp": ("batches",),
        "magnitude": (),
        "obd": ("posterior",),
        "opd": ("posterior",),
        "random": (),
        "snip": ("batches",),
        "synflow": ("example",),
        "wanda": ("batches",),
    }


@pytest.mark.parametrize("name", ["opd", "obd", "snip", "grasp", "wanda", "synflow"])
def test_what_is_missing_is_named(name):
    with pytest.raises(ValueError, match=f"{name!r} needs {criteria.needs(name)[0]}=…"):
        score(nn.Linear(2, 2), name)


def test_an_unknown_name_gets_the_nearest():
    with pytest.raises(ValueError, match="did you mean 'magnitude'"):
        score(nn.Linear(2, 2), "magnitud")


def test_no_data_is_not_silence():
    with pytest.raises(ValueError, match="batches is empty"):
        score(nn.Linear(2, 2), "snip", batches=[])


def test_magnitude_is_the_absolute_value():
    model = nn.Linear(3, 2)
    assert torch.equal(score(model, "magnitude")["weight"], model.weight.detach().abs())


def test_random_depends_on_the_seed_alone():
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    torch.manual_seed(5)
    first = score(model, "random", seed=1)
    torch.manual_seed(6)
    assert all(torch.equal(first[n], s) for n, s in score(model, "random", seed=1).items())
    assert not torch.equal(first["0.weight"], score(model, "random", seed=2)["0.weight"])
    assert not torch.equal(first["0.weight"], first["1.weight"])


def test_a_weight_that_is_nan_is_named():
    model = nn.Linear(2, 2)
    with torch.no_grad():
        model.weight[0, 0] = float("nan")
    with pytest.raises(ValueError, match="'magnitude' returned 1 NaN scores for 'weight'"):
        score(model, "magnitude")


def test_a_users_own_in_one_function(own):
    own(lambda given, power=2: {n: w.detach().abs() ** power for n, w in given.weights.items()})
    check_criterion("own", power=3)
    model = nn.Linear(2, 2)
    torch.testing.assert_close(score(model, "own", power=3)["weight"], model.weight.detach().abs() ** 3)


def test_a_taken_name_and_an_unknown_need_are_refused():
    with pytest.raises(ValueError, match="'magnitude' exists already"):
        criteria.criterion("magnitude")(lambda given: {})
    with pytest.raises(ValueError, match="did you mean 'posterior'"):
        criteria.criterion("new", needs=["posteriors"])
    assert "new" not in criteria.names()


def _scores(given):
    return {n: w.detach().abs() for n, w in given.weights.items()}


def _changes_weights(given):
    for weight in given.weights.values():
        weight.data.add_(1)
    return _scores(given)


def _changes_gradients(given):
    next(iter(given.weights.values())).grad = None
    return _scores(given)


def _changes_statistics(given):
    given.model.train()
    for batch in given.batches():
        given.forward(given.model, batch)
    return _scores(given)


def _leaves_hooks(given):
    given.model.register_forward_hook(lambda *_: None)
    return _scores(given)


DEFECTS = {
    "weights and buffers": (_changes_weights, ()),
    "gradients": (_changes_gradients, ()),
    "buffers": (_changes_statistics, ("batches",)),
    "hooks": (_leaves_hooks, ()),
    "not floating point": (lambda given: {n: w > 0 for n, w in _scores(given).items()}, ()),
    "the weight itself": (lambda given: {n: w.detach() for n, w in given.weights.items()}, ()),
}


@pytest.mark.parametrize("message", list(DEFECTS))
def test_the_check_finds_each_defect(own, message):
    function, needs = DEFECTS[message]
    own(function, needs=needs)
    with pytest.raises(AssertionError, match=message):
        check_criterion("own")


def test_the_check_finds_scores_that_depend_on_more_than_the_seed(own):
    calls = iter(range(100))
    own(lambda given: {n: w + next(calls) for n, w in _scores(given).items()})
    with pytest.raises(AssertionError, match="one seed differ"):
        check_criterion("own")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda given: {}, "no score for '0.weight'"),
        (lambda given: {n: w.sum(0) for n, w in _scores(given).items()}, "shape"),
        (lambda given: {n: w * float("nan") for n, w in _scores(given).items()}, "NaN"),
        (lambda given: {n: given.posterior.precision()[n] for n in given.weights}, "no posterior was given"),
        (lambda given: {n: len(list(given.batches())) for n in given.weights}, "no data were given"),
    ],
)
def test_unusable_scores_and_undeclared_needs_are_errors(own, function, message):
    own(function)
    with pytest.raises(ValueError, match=message):
        check_criterion("own")


def test_needs_are_a_list():
    with pytest.raises(TypeError, match=r"needs=\['posterior'\]"):
        criteria.criterion("one-need", needs="posterior")
