"""What a user may get wrong with SpaM: short trainings adapt, mistakes are refused or warned of."""

import warnings

import pytest
import torch
from torch import nn

from shaver.curvature import estimate
from shaver.settings import Settings
from shaver.spam import SpaM
from shaver.timetable import pace
from tests.spam.toys import N, blobs, mlp, sgd, split, train


@pytest.mark.parametrize(
    ("steps", "expected"),
    [(None, (15, 50)), (10_000, (15, 50)), (2000, (10, 30)), (800, (4, 12)), (24, (1, 2)), (3, (1, 1))],
)
def test_a_short_training_looks_and_learns_more_often(steps: int | None, expected: tuple[int, int]):
    assert pace(Settings(), steps) == expected


def test_a_shared_delta_is_updated_less_often():
    spam = SpaM(mlp(), N, total_steps=800)
    shared = SpaM(mlp(), N, total_steps=800, prior="unit")
    assert (spam.timetable.update, shared.timetable.update) == (10, 50)
    assert pace(Settings(), 100, per_weight=False) == (4, 12)
    assert pace(Settings(), 10_000, per_weight=False) == (10, 50)


def test_frequent_updates_move_the_weights_less():
    shares = [Settings().share(update) for update in (1, 5, 13, 50)]
    assert shares == sorted(shares)
    assert shares[-1] == Settings().share(200) == Settings().shrink
    per_step = 1 - (1 - Settings().shrink) ** (1 / 50)
    assert per_step < shares[0] < Settings().shrink
    assert (Settings(shrink=1.0).share(1), Settings(shrink=0.0).share(1)) == (1.0, 0.0)


def test_delta_is_learned_even_in_a_few_steps():
    model = mlp()
    spam = SpaM(model, N, total_steps=18)
    train(model, spam, sgd(model), split(blobs()), 3)
    assert spam.steps == 18
    assert spam.updates >= 4


def test_what_is_asked_for_is_kept_and_warned_of_where_it_does_nothing():
    assert pace(Settings(every=7, update=30), 60) == (7, 30)
    with pytest.warns(UserWarning, match=r"δ will not be updated in 24 steps with update=50"):
        SpaM(mlp(), N, total_steps=24, update=50)
    with pytest.warns(UserWarning, match="δ will not be updated in 1000 steps"):
        pace(Settings(burn_in=0.5, update=500), 1000)
    with pytest.raises(ValueError, match=r"0 ≤ burn_in < freeze ≤ 1, not 0\.8 and 0\.5"):
        Settings(burn_in=0.8, freeze=0.5)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        SpaM(mlp(), N, total_steps=24)


@pytest.mark.parametrize(("kind", "instead"), [("SGD", "weight_decay=0.01 to SpaM"), ("AdamW", "AdamW's default")])
def test_weight_decay_beside_the_prior_is_warned_of_once(kind: str, instead: str):
    model = mlp()
    spam = SpaM(model, N)
    optimizer = getattr(torch.optim, kind)(model.parameters(), lr=0.01, weight_decay=0.01)
    with pytest.warns(UserWarning, match=instead) as caught:
        train(model, spam, optimizer, split(blobs()), 1)
    assert len([w for w in caught if "weight_decay" in str(w.message)]) == 1


@pytest.mark.parametrize("attached", [True, False])
def test_an_optimizer_of_another_model_is_refused(attached: bool):
    spam = SpaM(mlp(), N)
    with pytest.raises(ValueError, match="SGD holds no trainable parameter of SpaM's model"):
        spam.attach(sgd(mlp())) if attached else spam.step(sgd(mlp()))


def test_the_number_of_batches_is_not_that_of_samples():
    model = mlp()
    spam = SpaM(model, 6, every=1)
    with pytest.warns(UserWarning, match="a step has 16 samples, but data_size is 6"):
        train(model, spam, sgd(model), split(blobs()), 1)


def test_a_loader_is_no_number_of_samples():
    with pytest.raises(ValueError, match="data_size, the number of training samples, must be an integer"):
        SpaM(mlp(), split(blobs()))  # type: ignore[arg-type]


def test_targets_of_a_regression_do_not_broadcast():
    model = nn.Linear(6, 1).double()
    spam = SpaM(model, N, likelihood="regression")
    x, y = blobs()
    with pytest.raises(ValueError, match=r"shaped like the outputs, \(96, 1\)"):
        spam.loss(model(x), y.double())


@pytest.mark.parametrize("flat", [True, False])
def test_one_logit_is_no_softmax(flat: bool):
    model: nn.Module = nn.Sequential(nn.Linear(6, 1), nn.Flatten(0)) if flat else nn.Linear(6, 1)
    model.double()
    SpaM(model, N, every=1)
    x, y = blobs()
    with pytest.raises(ValueError, match="at least two classes"):
        model(x)
    with pytest.raises(ValueError, match=r"at least two classes|samples"):
        estimate(model.eval(), [(x, y)])


def test_a_regression_whose_likelihood_is_not_told_is_warned_of():
    model = nn.Linear(6, 1).double()
    spam = SpaM(model, N, likelihood="regression", every=1, update=1)
    x, y = blobs()
    torch.nn.functional.mse_loss(model(x)[:, 0], y.double()).backward()
    with pytest.warns(UserWarning, match="the regression noise is not learned"):
        spam.step(sgd(model, lr=0.01))


def test_one_of_several_optimizers_may_be_another_model_s():
    model, head = mlp(), mlp()
    spam = SpaM(model, N)
    x, y = blobs()
    torch.nn.functional.cross_entropy(model(x), y).backward()
    spam.step(sgd(model), sgd(head))
    assert spam.steps == 1


def test_a_closure_s_optimizer_is_checked_too():
    with pytest.raises(ValueError, match="holds no trainable parameter"):
        SpaM(mlp(), N).step(torch.optim.LBFGS(mlp().parameters()), closure=lambda: None)


def test_a_matrix_that_becomes_zero_is_named():
    """At a huge learning rate the proximal step removes every weight of a layer."""
    model, (x, y) = mlp(), blobs()
    spam = SpaM(model, N, every=1, update=2, burn_in=0, initial_precision=1e6)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6)

    def steps() -> None:
        for _ in range(4):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x).clamp(-50, 50), y).backward()
            spam.step(optimizer)

    with pytest.warns(UserWarning, match="every weight of '0.weight'.* is zero after step"):
        steps()


@pytest.mark.parametrize("prior", ["parameter", "unit", "layer", "scalar"])
def test_a_matrix_that_an_update_would_remove_keeps_its_precision(prior: str):
    """The first layer's weights are so small that the evidence prefers none of them."""
    model, (x, y) = mlp(), blobs()
    spam = SpaM(model, N, prior=prior, every=1, update=1, burn_in=0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        spam.step(optimizer)

    step()
    with torch.no_grad():
        model[0].weight.mul_(1e-9)
    before, other = spam.prior.delta_of("0.weight").clone(), spam.prior.delta_of("2.weight").clone()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(3):
            step()
    about = [str(w.message) for w in said if "would remove every weight of '0.weight'" in str(w.message)]
    assert not torch.equal(spam.prior.delta_of("2.weight"), other), "the rest goes on learning"
    if prior == "scalar":  # one precision for all cannot be kept for one matrix
        assert not about
    else:
        torch.testing.assert_close(spam.prior.delta_of("0.weight"), before, rtol=1e-6, atol=0.0)
        assert len(about) == 1
        assert "at step 2 its effective number of weights would fall from" in about[0]


def test_print_says_how_far_it_is():
    model, (x, y) = mlp(), blobs()
    spam = SpaM(model, N, every=1, update=1, total_steps=40)
    assert "step 0 of 40, 0 curvature measurements, 0 updates of δ" in str(spam)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(6):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        spam.step(optimizer)
    text = str(spam)
    assert f"{N} samples" in text
    assert "prior 'parameter', structure 'diag', source 'mc'" in text
    assert "step 6 of 40" in text
    assert "effective_parameters" in text
