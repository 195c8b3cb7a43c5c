"""Curvature from training's own passes: the same numbers as an estimate on the measured batches."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.curvature import OnlineCurvature
from shaver.curvature.online import LARGE
from shaver.likelihoods import Classification
from tests.curvature.cases import Case, normal
from tests.curvature.networks import VisionTransformer
from tests.curvature.online_cases import (
    LOSSES,
    STEADY,
    N,
    assert_step,
    by_hand,
    expected,
    nlls,
    online_for,
    prepare,
    without_noise,
)
from tests.curvature.reference import assert_all_same

# One step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", STEADY, ids=lambda case: case.name)
def test_one_measured_step_is_an_estimate_on_its_batch(case: Case):
    model, (batch,) = without_noise(case.model()), case.batches((5,))
    online = online_for(model, likelihood=case.likelihood)
    nll = nlls(case, model, batch)
    online.note(float(nll.detach().sum()))  # nothing new for a classifier, whose likelihood is read off the gradient
    with online.measure():
        nll.mean().backward()
    assert_step(online, case, [batch])
    assert online.weight == pytest.approx(1, rel=1e-9)
    generic = {name for name, rule in online.curvature().rules.items() if "generic" in rule}
    assert generic == case.generic


@pytest.mark.parametrize("case", STEADY, ids=lambda case: case.name)
def test_a_later_step_is_one_too(case: Case):
    """The first measurement makes the plan; the later ones use it with another number of samples."""
    model, batches = without_noise(case.model()), case.batches((3, 4))
    online = online_for(model, likelihood=case.likelihood)
    for batch in batches:
        model.zero_grad()
        nll = nlls(case, model, batch)
        online.note(float(nll.detach().sum()))
        with online.measure():
            nll.mean().backward()
    assert_step(online, case, batches[1:])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["lenet", "tied-language-model", "attention-batch-first", "vision-transformer"])
def test_the_scale_of_the_loss_does_not_matter(name: str, loss: str):
    case, model, (batch,) = prepare(name)
    online = online_for(model)
    make, weight = LOSSES[loss]
    with online.measure():
        make(nlls(case, model, batch)).backward()
    assert_step(online, case, [batch])
    assert online.weight == pytest.approx(weight, rel=1e-9)


def test_a_mean_over_tokens_weighs_one_token():
    """The mean over 4 tokens a sample counts a sample ¼ times: so must the prior."""
    case, model, (batch,) = prepare("token-labels")
    x, y = batch[0], batch[1].clamp_min(0)
    online = online_for(model)
    with online.measure():
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    assert_step(online, case, [(x, y)])
    assert online.weight == pytest.approx(1 / 4, rel=1e-9)


def test_a_large_layer_waits_in_16_bits_and_loses_nothing_else():
    """Three passes of one step: the first is rounded to 8 bits of mantissa, the others are added in 32."""
    model = nn.Sequential(nn.Linear(600, 500, bias=False))
    assert model[0].weight.numel() > LARGE
    batches = [(torch.randn(3, 600), torch.randint(0, 500, (3,))) for _ in range(3)]
    for used, dtype in ((batches[:1], torch.bfloat16), (batches, torch.float32)):
        online = OnlineCurvature(model, data_size=N, source="ef", every=1)
        squares = torch.zeros(500, 600)
        for x, y in used:
            F.cross_entropy(model(x), y).backward()
            b = model(x).softmax(-1).detach() - F.one_hot(y, 500)
            squares += b.square().t() @ x.square()
        assert {sums.dtype for sums in online._sums.values()} == {dtype}
        assert online.step()
        found = online.curvature().diagonal()["0.weight"] * 3 * len(used) / N
        assert torch.allclose(found, squares, rtol=2**-8, atol=1e-9)
        online.close()


@pytest.mark.parametrize("name", ["lenet", "called-twice", "attention-batch-first", "vision-transformer"])
def test_accumulated_batches_are_one_larger_batch(name: str):
    case, model, batches = prepare(name, (5, 2))
    online = online_for(model)
    for batch in batches:
        (nlls(case, model, batch).sum() / 7).backward()
    assert online.step()
    assert_step(online, case, batches)
    assert online.weight == pytest.approx(1, rel=1e-9)


def test_accumulation_with_halved_means_of_unequal_batches():
    case, model, batches = prepare("lenet", (5, 2))
    online = online_for(model)
    for batch in batches:
        (nlls(case, model, batch).mean() / 2).backward()
    online.step()
    assert_step(online, case, batches)
    assert online.weight == pytest.approx(1, rel=1e-9)


def test_a_smaller_last_batch_counts_for_as_much():
    """Each measurement is scaled to the data set by its own batch size."""
    case, model, batches = prepare("lenet", (5, 2))
    online = online_for(model, decay=0.5)
    for batch in batches:
        with online.measure():
            nlls(case, model, batch).mean().backward()
    (first, ll1), (second, ll2) = (expected(case, model, [batch]) for batch in batches)
    weights = (1 / 3, 2 / 3)  # ½ · ½ and ½, divided by their sum
    found = online.curvature()
    assert_all_same(found.diagonal(), {n: weights[0] * first[n] + weights[1] * second[n] for n in first})
    assert found.log_likelihood == pytest.approx(weights[0] * ll1 + weights[1] * ll2, rel=1e-10)


@pytest.mark.parametrize("first", [1, 3])
def test_a_first_batch_of_one_does_not_fix_where_samples_stand(first: int):
    case, model, batches = prepare("linear-folded-positions-major", (first, 4))
    online = online_for(model)
    for batch in batches:
        with online.measure():
            nlls(case, model, batch).mean().backward()
    assert_step(online, case, batches[1:])
    assert not any("generic" in rule for rule in online.curvature().rules.values())


def test_samples_without_loss_count_as_samples():
    """A micro-batch of ignored labels adds nothing to H, but it is part of the batch H is averaged over."""
    case, model, batches = prepare("token-labels", (3, 2))
    batches[1][1][:] = -100
    online = online_for(model)
    for batch in batches:
        (nlls(case, model, batch).sum() / 5).backward()
    online.step()
    assert_step(online, case, batches)
    assert online.weight == pytest.approx(1, rel=1e-9)


def test_a_step_in_which_nothing_has_a_loss_keeps_the_weight():
    case, model, (batch,) = prepare("token-labels")
    online = online_for(model)
    with online.measure():
        nlls(case, model, batch).sum().backward()
    with online.measure():
        nlls(case, model, (batch[0], torch.full_like(batch[1], -100))).sum().backward()
    assert online.weight == pytest.approx(5)
    assert not any(h.any() for h in online.curvature().diagonal().values())


@pytest.mark.parametrize("source", ["ef", "mc"])
def test_a_model_that_is_a_single_layer(source: str):
    case = Case("layer", lambda: nn.Linear(4, 3), normal(4))
    model, batches = case.model(), case.batches((5, 3))
    for batch in batches:
        online = online_for(model, source=source, seed=3)
        with online.measure():
            nlls(case, model, batch).mean().backward()
        if source == "ef":
            assert_step(online, case, [batch])
        else:
            drawn = Classification().mc_gradient(model(batch[0]).detach(), torch.Generator().manual_seed(3))
            by_sample = by_hand(case, model, batch, drawn)
            assert_all_same(online.curvature().diagonal(), {n: N / len(drawn) * h for n, h in by_sample.items()})
        online.close()


# Which passes and steps ------------------------------------------------------------------------------------------


def test_the_average_is_the_weighted_sum_over_measurements():
    case, model, batches = prepare("mlp", (4, 4, 3, 5))
    decay = 0.7
    online = online_for(model, decay=decay)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps = []
    for batch in batches:
        steps.append(expected(case, model, [batch]))
        optimizer.zero_grad()
        with online.measure():
            nlls(case, model, batch).mean().backward()
        optimizer.step()
    weights = [decay ** (len(steps) - 1 - i) for i in range(len(steps))]
    average = {
        name: sum(w * h[name] for w, (h, _) in zip(weights, steps, strict=True)) / sum(weights) for name in steps[0][0]
    }
    found = online.curvature()
    assert_all_same(found.diagonal(), average)
    likelihood = sum(w * ll for w, (_, ll) in zip(weights, steps, strict=True)) / sum(weights)
    assert found.log_likelihood == pytest.approx(likelihood, rel=1e-10)


def test_only_every_kth_step_is_measured():
    case, model, batches = prepare("mlp", (4,) * 7)
    online = online_for(model, every=3)
    for step, batch in enumerate(batches):
        assert online.active == (step % 3 == 0)
        nlls(case, model, batch).mean().backward()
        assert online.step() == (step % 3 == 0)
    assert (online.steps, online.measurements) == (7, 3)
    assert_step(online, case, batches[6:])


def test_evaluation_and_no_grad_passes_are_not_measured():
    case, model, (batch, other) = prepare("vision-transformer", (4, 3))
    online = online_for(model)
    with torch.no_grad():
        nlls(case, model, other)
    nlls(case, model.eval(), other).mean().backward()
    model.train()
    nlls(case, model, other)  # with gradients on, but never differentiated
    nlls(case, model, batch).mean().backward()
    with torch.no_grad():
        nlls(case, model, other)
    online.step()
    assert_step(online, case, [batch])


def test_a_step_without_a_pass_changes_nothing():
    case, model, (batch,) = prepare("mlp")
    online = online_for(model)
    assert not online.step()
    with pytest.raises(RuntimeError, match="no training step has been measured"):
        online.curvature()
    with online.measure():
        nlls(case, model, batch).mean().backward()
    before = online.curvature().diagonal()
    assert not online.step()
    assert_all_same(online.curvature().diagonal(), before, 0.0)


def test_the_first_of_two_backward_passes_counts():
    case, model, (batch,) = prepare("called-twice")
    online = online_for(model)
    loss = nlls(case, model, batch).mean()
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    online.step()
    assert_step(online, case, [batch])


@pytest.mark.parametrize("source", ["ef", "mc"])
def test_a_backward_pass_after_its_step_is_too_late(source: str):
    case, model, (batch, other) = prepare("called-twice", (4, 3))
    online = online_for(model, source=source)
    late = nlls(case, model, other).mean()
    online.step()
    late.backward()
    assert online.measurements == 0
    with online.measure():
        nlls(case, model, batch).mean().backward()
    if source == "ef":
        assert_step(online, case, [batch])


def test_a_backward_pass_that_fails_leaves_nothing_behind():
    case, model, (batch, other) = prepare("lenet", (4, 3))
    online = online_for(model)

    def fail(grad: Tensor) -> None:
        raise MemoryError("no room")

    outputs = model(other[0])
    handle = model[0].weight.register_hook(fail)  # the very last gradient: every layer has been measured by then
    with pytest.raises(MemoryError), online.measure():
        F.cross_entropy(outputs, other[1]).backward()
    handle.remove()
    with online.measure():
        nlls(case, model, batch).mean().backward()
    assert_step(online, case, [batch])


def test_raw_parameters_of_the_root_are_seen_in_the_very_first_measurement():
    case, model, batches = prepare("vision-transformer", (4, 3))
    assert isinstance(model, VisionTransformer)
    online = online_for(model)
    for batch in batches:
        with online.measure():
            nlls(case, model, batch).mean().backward()
        assert online.curvature().rules["token"] == "one copy per sample"
        assert_step(online, case, [batch])
        assert online.curvature().diagonal()["token"].all()


# Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "ggn"}, "online source"),
        ({"loss": "median"}, "mean"),
        ({"data_size": 0}, "data_size must be an integer of at least 1, not 0"),
        ({"every": 0}, "every must be an integer of at least 1, not 0"),
        ({"decay": 1.0}, r"decay must be below 1, not 1\.0"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        online_for(nn.Linear(2, 2), **options)


def test_a_model_without_trainable_parameters():
    with pytest.raises(ValueError, match="no trainable parameter"):
        online_for(nn.Linear(2, 2).requires_grad_(False))
