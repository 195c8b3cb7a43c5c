"""Curvature from training's own passes: the same numbers as an estimate, whatever the loss's scale, and no trace."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from cases import BY_NAME, CASES, Case, normal
from networks import VisionTransformer
from reference import assert_all_same
from torch import Tensor, nn

from shaver.batches import targets_of
from shaver.curvature import OnlineCurvature, estimate
from shaver.io import load_state, save_state
from shaver.likelihoods import Classification, get_likelihood

N = 50


def without_noise(model: nn.Module) -> nn.Module:
    """Training mode, but with no dropout: a watched pass and an estimate see the same network."""
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        elif isinstance(module, nn.MultiheadAttention):
            module.dropout = 0.0
    return model.train()


def same_in_training(case: Case) -> bool:
    """No layer that uses the batch's own statistics in training."""
    tracked = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
    return not any(isinstance(m, tracked) and m.track_running_stats for m in case.build().modules())


STEADY = [case for case in CASES if same_in_training(case)]
CLASSIFIERS = [case for case in STEADY if isinstance(get_likelihood(case.likelihood), Classification)]


def forward(case: Case, model: nn.Module, batch: Any) -> Tensor:
    outputs = case.reading["forward"](model, batch) if case.keys else model(batch[0])
    assert isinstance(outputs, Tensor)
    return outputs


def nlls(case: Case, model: nn.Module, batch: Any) -> Tensor:
    """The negative log likelihood of each sample, by a pass that is watched."""
    return get_likelihood(case.likelihood).nll(forward(case, model, batch), targets_of(batch))


def watch(model: nn.Module, **options: Any) -> OnlineCurvature:
    return OnlineCurvature(model, **({"data_size": N, "every": 1, "decay": 0.0} | options))


def expected(case: Case, model: nn.Module, batches: list[Any], source: str = "ef") -> tuple[dict[str, Tensor], float]:
    """N/B of an estimate over a step's batches, and its log likelihood."""
    found = estimate(model, batches, case.likelihood, source=source, **case.reading)
    scale = N / found.data_size
    return {name: scale * h for name, h in found.diagonal().items()}, scale * found.log_likelihood


def assert_step(online: OnlineCurvature, case: Case, batches: list[Any]) -> None:
    diagonal, log_likelihood = expected(case, online.model, batches)
    found = online.curvature()
    assert_all_same(found.diagonal(), diagonal)
    assert found.log_likelihood == pytest.approx(log_likelihood, rel=1e-10)
    assert (found.data_size, found.structure, found.source) == (N, "diag", "ef")


def prepare(name: str = "lenet", sizes: tuple[int, ...] = (5,)) -> tuple[Case, nn.Module, list[Any]]:
    case = BY_NAME[name]
    return case, without_noise(case.model()), case.batches(sizes)


# One step --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", STEADY, ids=lambda case: case.name)
def test_one_watched_step_is_an_estimate_on_its_batch(case: Case):
    model, (batch,) = without_noise(case.model()), case.batches((5,))
    online = watch(model, likelihood=case.likelihood)
    nll = nlls(case, model, batch)
    online.note(float(nll.detach().sum()))  # nothing new for a classifier, whose likelihood is read off the gradient
    with online.watch():
        nll.mean().backward()
    assert_step(online, case, [batch])
    assert online.weight == pytest.approx(1, rel=1e-9)
    generic = {name for name, rule in online.curvature().rules.items() if "generic" in rule}
    assert generic <= case.generic


@pytest.mark.parametrize("case", STEADY, ids=lambda case: case.name)
def test_a_later_step_is_one_too(case: Case):
    """The first look plans; the later ones meet hooks that are already there, and another number of samples."""
    model, batches = without_noise(case.model()), case.batches((3, 4))
    online = watch(model, likelihood=case.likelihood)
    for batch in batches:
        model.zero_grad()
        nll = nlls(case, model, batch)
        online.note(float(nll.detach().sum()))
        with online.watch():
            nll.mean().backward()
    assert_step(online, case, batches[1:])


LOSSES: dict[str, tuple[Callable[[Tensor], Tensor], float]] = {
    "mean": (lambda nll: nll.mean(), 1.0),
    "sum": (lambda nll: nll.sum(), 5.0),
    "a part of the mean": (lambda nll: 0.37 * nll.mean(), 0.37),
    "scaled": (lambda nll: 1024 * nll.mean(), 1024.0),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", ["lenet", "tied-language-model", "attention-batch-first", "vision-transformer"])
def test_the_scale_of_the_loss_does_not_matter(name: str, loss: str):
    case, model, (batch,) = prepare(name)
    online = watch(model)
    make, weight = LOSSES[loss]
    with online.watch():
        make(nlls(case, model, batch)).backward()
    assert_step(online, case, [batch])
    assert online.weight == pytest.approx(weight, rel=1e-9)


def test_a_mean_over_tokens_weighs_one_token():
    """The mean over 4 tokens a sample counts a sample ¼ times: so must the prior."""
    case, model, (batch,) = prepare("token-labels")
    x, y = batch[0], batch[1].clamp_min(0)
    online = watch(model)
    with online.watch():
        F.cross_entropy(model(x).flatten(0, 1), y.flatten()).backward()
    assert_step(online, case, [(x, y)])
    assert online.weight == pytest.approx(1 / 4, rel=1e-9)


@pytest.mark.parametrize("name", ["lenet", "called-twice", "attention-batch-first", "vision-transformer"])
def test_accumulated_batches_are_one_larger_batch(name: str):
    case, model, batches = prepare(name, (5, 2))
    online = watch(model)
    for batch in batches:
        (nlls(case, model, batch).sum() / 7).backward()
    assert online.step()
    assert_step(online, case, batches)
    assert online.weight == pytest.approx(1, rel=1e-9)


def test_accumulation_with_halved_means_of_unequal_batches():
    case, model, batches = prepare("lenet", (5, 2))
    online = watch(model)
    for batch in batches:
        (nlls(case, model, batch).mean() / 2).backward()
    online.step()
    assert_step(online, case, batches)
    assert online.weight == pytest.approx(1, rel=1e-9)


def test_a_smaller_last_batch_counts_for_as_much():
    """Each look is scaled to the data set by its own batch size."""
    case, model, batches = prepare("lenet", (5, 2))
    online = watch(model, decay=0.5)
    for batch in batches:
        with online.watch():
            nlls(case, model, batch).mean().backward()
    (first, ll1), (second, ll2) = (expected(case, model, [batch]) for batch in batches)
    weights = (1 / 3, 2 / 3)  # ½ · ½ and ½, divided by their sum
    found = online.curvature()
    assert_all_same(found.diagonal(), {n: weights[0] * first[n] + weights[1] * second[n] for n in first})
    assert found.log_likelihood == pytest.approx(weights[0] * ll1 + weights[1] * ll2, rel=1e-10)


@pytest.mark.parametrize("first", [1, 3])
def test_a_first_batch_of_one_does_not_fix_where_samples_stand(first: int):
    case, model, batches = prepare("sequence-first", (first, 4))
    online = watch(model)
    for batch in batches:
        with online.watch():
            nlls(case, model, batch).mean().backward()
    assert_step(online, case, batches[1:])
    assert not any("generic" in rule for rule in online.curvature().rules.values())


def test_samples_without_loss_count_as_samples():
    """A micro-batch of ignored labels adds nothing to H, but it is part of the batch H is averaged over."""
    case, model, batches = prepare("token-labels", (3, 2))
    batches[1][1][:] = -100
    online = watch(model)
    for batch in batches:
        (nlls(case, model, batch).sum() / 5).backward()
    online.step()
    assert_step(online, case, batches)
    assert online.weight == pytest.approx(1, rel=1e-9)


def test_a_step_in_which_nothing_has_a_loss_keeps_the_weight():
    case, model, (batch,) = prepare("token-labels")
    online = watch(model)
    with online.watch():
        nlls(case, model, batch).sum().backward()
    with online.watch():
        nlls(case, model, (batch[0], torch.full_like(batch[1], -100))).sum().backward()
    assert online.weight == pytest.approx(5)
    assert not any(h.any() for h in online.curvature().diagonal().values())


@pytest.mark.parametrize("source", ["ef", "mc"])
def test_a_model_that_is_a_single_layer(source: str):
    case = Case("layer", lambda: nn.Linear(4, 3), normal(4))
    model, batches = case.model(), case.batches((5, 3))
    for batch in batches:
        online = watch(model, source=source, seed=3)
        with online.watch():
            nlls(case, model, batch).mean().backward()
        if source == "ef":
            assert_step(online, case, [batch])
        else:
            drawn = Classification().mc_gradient(model(batch[0]).detach(), torch.Generator().manual_seed(3))
            by_sample = by_hand(case, model, batch, drawn)
            assert_all_same(online.curvature().diagonal(), {n: N / len(drawn) * h for n, h in by_sample.items()})
        online.close()


# Which passes and steps ------------------------------------------------------------------------------------------


def test_the_average_is_the_weighted_sum_over_looks():
    case, model, batches = prepare("mlp", (4, 4, 3, 5))
    decay = 0.7
    online = watch(model, decay=decay)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    looks = []
    for batch in batches:
        looks.append(expected(case, model, [batch]))
        optimizer.zero_grad()
        with online.watch():
            nlls(case, model, batch).mean().backward()
        optimizer.step()
    weights = [decay ** (len(looks) - 1 - i) for i in range(len(looks))]
    average = {
        name: sum(w * h[name] for w, (h, _) in zip(weights, looks, strict=True)) / sum(weights) for name in looks[0][0]
    }
    found = online.curvature()
    assert_all_same(found.diagonal(), average)
    likelihood = sum(w * ll for w, (_, ll) in zip(weights, looks, strict=True)) / sum(weights)
    assert found.log_likelihood == pytest.approx(likelihood, rel=1e-10)


def test_only_every_kth_step_is_looked_at():
    case, model, batches = prepare("mlp", (4,) * 7)
    online = watch(model, every=3)
    for step, batch in enumerate(batches):
        assert online.active == (step % 3 == 0)
        nlls(case, model, batch).mean().backward()
        assert online.step() == (step % 3 == 0)
    assert (online.steps, online.looks) == (7, 3)
    assert_step(online, case, batches[6:])


def test_evaluation_and_no_grad_passes_are_not_looked_at():
    case, model, (batch, other) = prepare("vision-transformer", (4, 3))
    online = watch(model)
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
    online = watch(model)
    assert not online.step()
    with pytest.raises(RuntimeError, match="no training step has been observed"):
        online.curvature()
    with online.watch():
        nlls(case, model, batch).mean().backward()
    before = online.curvature().diagonal()
    assert not online.step()
    assert_all_same(online.curvature().diagonal(), before, 0.0)


def test_the_first_of_two_backward_passes_counts():
    case, model, (batch,) = prepare("called-twice")
    online = watch(model)
    loss = nlls(case, model, batch).mean()
    loss.backward(retain_graph=True)
    (3 * loss).backward()
    online.step()
    assert_step(online, case, [batch])


@pytest.mark.parametrize("source", ["ef", "mc"])
def test_a_backward_pass_after_its_step_is_too_late(source: str):
    case, model, (batch, other) = prepare("called-twice", (4, 3))
    online = watch(model, source=source)
    late = nlls(case, model, other).mean()
    online.step()
    late.backward()
    assert online.looks == 0
    with online.watch():
        nlls(case, model, batch).mean().backward()
    if source == "ef":
        assert_step(online, case, [batch])


def test_a_backward_pass_that_fails_leaves_nothing_behind():
    case, model, (batch, other) = prepare("lenet", (4, 3))
    online = watch(model)

    def fail(grad: Tensor) -> None:
        raise MemoryError("no room")

    outputs = model(other[0])
    handle = model[0].weight.register_hook(fail)  # the very last gradient: every layer has been looked at by then
    with pytest.raises(MemoryError), online.watch():
        F.cross_entropy(outputs, other[1]).backward()
    handle.remove()
    with online.watch():
        nlls(case, model, batch).mean().backward()
    assert_step(online, case, [batch])


def test_raw_parameters_of_the_root_are_seen_in_the_very_first_look():
    case, model, batches = prepare("vision-transformer", (4, 3))
    assert isinstance(model, VisionTransformer)
    online = watch(model)
    for batch in batches:
        with online.watch():
            nlls(case, model, batch).mean().backward()
        assert online.curvature().rules["token"] == "one copy a sample"
        assert_step(online, case, [batch])
        assert online.curvature().diagonal()["token"].all()


# MC --------------------------------------------------------------------------------------------------------------

SAMPLED = ["mlp", "lenet", "tied-language-model", "vision-transformer", "attention-batch-first", "bilinear-form"]


def by_hand(case: Case, model: nn.Module, batch: Any, gradient: Tensor) -> dict[str, Tensor]:
    """Σ_n (J_nᵀ g_n)² by one backward pass a sample."""
    parameters = dict(model.named_parameters())
    total = {name: torch.zeros_like(p) for name, p in parameters.items()}
    for n in range(len(gradient)):
        outputs = forward(case, model, (batch[0][n : n + 1], batch[1][n : n + 1]))
        rows = torch.autograd.grad(outputs, list(parameters.values()), gradient[n : n + 1], allow_unused=True)
        for name, row in zip(parameters, rows, strict=True):
            total[name] += 0 if row is None else row.square()
    return total


@pytest.mark.parametrize("loss", ["mean", "scaled"])
@pytest.mark.parametrize("name", SAMPLED)
def test_mc_squares_the_gradient_of_drawn_labels(name: str, loss: str):
    case, model, (batch,) = prepare(name)
    with torch.no_grad():
        outputs = forward(case, model, batch)
    drawn = get_likelihood(case.likelihood).mc_gradient(outputs, torch.Generator().manual_seed(3))
    diagonal = {n: N / 5 * h for n, h in by_hand(case, model, batch, drawn).items()}
    online = watch(model, source="mc", seed=3)
    make, weight = LOSSES[loss]
    with online.watch():
        make(nlls(case, model, batch)).backward()
    assert_all_same(online.curvature().diagonal(), diagonal)
    assert online.curvature().log_likelihood == pytest.approx(expected(case, model, [batch])[1], rel=1e-10)
    assert online.weight == pytest.approx(weight, rel=1e-9)


def test_mc_draws_no_label_where_one_is_ignored():
    case, model, (batch,) = prepare("token-labels")
    with torch.no_grad():
        outputs = forward(case, model, batch)
    drawn = Classification().mc_gradient(outputs, torch.Generator().manual_seed(3))
    ignored = (batch[1] == -100).unsqueeze(-1)
    assert ignored.any()
    diagonal = {n: N / 5 * h for n, h in by_hand(case, model, batch, drawn.masked_fill(ignored, 0.0)).items()}
    for loss in ("auto", "mean"):
        online = watch(model, source="mc", seed=3, loss=loss)
        with online.watch():
            nlls(case, model, batch).mean().backward()
        assert_all_same(online.curvature().diagonal(), diagonal)
        online.close()


class OnlyGeneric(nn.Module):
    """Not one parameter has a rule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(2, 3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).tanh().mean(-1)


@pytest.mark.parametrize("source", ["ef", "mc"])
def test_a_model_that_is_all_generic(source: str):
    case = Case("only-generic", OnlyGeneric, normal(2, 3))
    model, (batch,) = case.model(), case.batches((5,))
    online = watch(model, source=source, seed=3)
    with online.watch():
        nlls(case, model, batch).mean().backward()
    assert "generic" in online.curvature().rules["conv.weight"]
    if source == "ef":
        return assert_step(online, case, [batch])
    drawn = Classification().mc_gradient(model(batch[0]).detach(), torch.Generator().manual_seed(3))
    diagonal = {n: N / 5 * h for n, h in by_hand(case, model, batch, drawn).items()}
    assert_all_same(online.curvature().diagonal(), diagonal)


def test_mc_goes_to_the_ggn_within_its_standard_error():
    case, model, (batch,) = prepare("mlp")
    online = watch(model, source="mc")
    looks = []
    for _ in range(300):
        with online.watch():
            nlls(case, model, batch).mean().backward()
        looks.append(torch.cat([h.flatten() for h in online.curvature().diagonal().values()]))
    draws = torch.stack(looks)
    ggn, ef = (
        torch.cat([h.flatten() for h in expected(case, model, [batch], source)[0].values()]) for source in ("ggn", "ef")
    )
    error = draws.std(0) / len(draws) ** 0.5
    noisy = error > 1e-9 * ggn.max()
    assert ((draws.mean(0) - ggn)[noisy] / error[noisy]).abs().max() < 5
    assert ((draws.mean(0) - ef)[noisy] / error[noisy]).abs().max() > 5, "the test has power"


def test_mc_follows_its_seed_and_leaves_the_global_one():
    case, model, (batch,) = prepare("vision-transformer")
    runs = []
    for seed in (1, 1, 2):
        online = watch(model, source="mc", seed=seed)
        torch.manual_seed(5)
        before = torch.get_rng_state()
        with online.watch():
            nlls(case, model, batch).mean().backward()
        assert torch.equal(torch.get_rng_state(), before)
        runs.append(online.curvature().diagonal()["head.weight"])
        online.close()
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("source", ["ef", "mc"])
def test_dropout_is_drawn_as_if_nobody_watched(source: str):
    case = BY_NAME["transformer-block"]
    model, (batch,) = case.model(), case.batches((5,))
    outcomes = []
    for watched in (False, True):
        online = watch(model, source=source) if watched else None
        torch.manual_seed(5)
        outcomes.append((forward(case, model, batch), forward(case, model, batch)))
        if online is not None:
            online.close()
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])
    assert not torch.equal(outcomes[0][0], outcomes[0][1])


# No trace --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("source", ["ef", "mc"])
@pytest.mark.parametrize("case", CLASSIFIERS, ids=lambda case: case.name)
def test_gradients_are_bitwise_the_same(case: Case, source: str):
    model, batches = without_noise(case.model()), case.batches((4, 3))

    def gradients() -> list[Tensor | None]:
        model.zero_grad()
        for batch in batches:
            nlls(case, model, batch).mean().backward()
        return [p.grad for p in model.parameters()]

    alone = gradients()
    online = watch(model, source=source, likelihood=case.likelihood)
    watched = gradients()
    online.step()
    rules = online.curvature().rules
    for (name, _parameter), old, new in zip(model.named_parameters(), alone, watched, strict=True):
        assert (old is None) == (new is None)
        if old is None or torch.equal(old, new):
            continue
        # given one copy a sample, the sum over samples and positions is taken in another order: the last bit may differ
        assert rules[name] == "one copy a sample", name
        torch.testing.assert_close(new, old, rtol=1e-14, atol=1e-14 * float(old.abs().max()))


def hooks_of(model: nn.Module) -> list[dict[str, Any]]:
    return [{k: dict(v) for k, v in vars(m).items() if "hook" in k and isinstance(v, dict)} for m in model.modules()]


@pytest.mark.parametrize("source", ["ef", "mc"])
def test_close_removes_every_hook(source: str):
    case, model, (batch,) = prepare("vision-transformer")
    model.block.register_forward_hook(lambda module, args, output: None)  # the user's own stays
    before, attributes = hooks_of(model), [set(vars(m)) for m in model.modules()]
    online = watch(model, source=source)
    with online.watch():
        nlls(case, model, batch).mean().backward()
    assert hooks_of(model) != before
    found = online.curvature().diagonal()
    online.close()
    assert hooks_of(model) == before
    assert [set(vars(m)) for m in model.modules()] == attributes
    nlls(case, model, batch).mean().backward()
    assert not online.step()
    assert_all_same(online.curvature().diagonal(), found, 0.0)


def test_a_failing_forward_pass_leaves_the_raw_parameters_in_place():
    case, model, (batch,) = prepare("vision-transformer")
    online = watch(model)
    good = batch[0]
    for look in range(2):
        broken = model.head.register_forward_pre_hook(lambda module, args: 1 / 0 if not online._busy else None)
        with pytest.raises(ZeroDivisionError):
            model(good)
        broken.remove()
        assert "token" not in vars(model), look
        assert model.token is dict(model.named_parameters())["token"]
    with online.watch():
        nlls(case, model, batch).mean().backward()
    assert_step(online, case, [batch])


def test_torch_s_own_functions_are_in_place_whenever_the_model_is_not_running():
    """Packed attention is seen through ``F.linear``, which is torch's again after the pass, also after a failed one."""
    case, model, (batch,) = prepare("attention-batch-first")
    plain = F.linear
    online = watch(model)
    seen = []
    model.head.register_forward_pre_hook(lambda module, args: seen.append(F.linear is not plain))
    forward(case, model, batch)
    assert F.linear is plain
    assert seen[-1], "this case is about something"
    with pytest.raises(AssertionError, match="embedding dimension"):
        model(torch.zeros(2, 3, 7).double())
    assert F.linear is plain
    online.close()
    forward(case, model, batch)
    assert not seen[-1]


def test_a_copy_of_a_watched_model_is_not_watched():
    case, model, (batch, other) = prepare("vision-transformer", (4, 3))
    online = watch(model)
    with online.watch():
        nlls(case, model, batch).mean().backward()
    before = online.curvature().diagonal()
    twin = copy.deepcopy(model)
    nlls(case, twin, other).mean().backward()
    assert not online.step()
    assert_all_same(online.curvature().diagonal(), before, 0.0)
    with online.watch():  # and the original still is
        nlls(case, model, other).mean().backward()
    assert_step(online, case, [other])


def test_a_step_keeps_nothing_of_its_passes(monkeypatch: pytest.MonkeyPatch):
    """Hooks in the autograd graph that know their pass, which knows the graph, would never be freed."""
    import gc
    import weakref

    from shaver.curvature import online as module

    alive: list[weakref.ref[Any]] = []

    class Counted(module.Pass):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            alive.append(weakref.ref(self))

    monkeypatch.setattr(module, "Pass", Counted)
    case, model, (batch,) = prepare("called-twice")
    gc.disable()
    try:
        for source in ("ef", "mc"):
            online = watch(model, source=source)
            nlls(case, model, batch).mean().backward()
            online.step()
            assert all(ref() is None for ref in alive), source
            online.close()
    finally:
        gc.enable()
    assert len(alive) == 2


@pytest.mark.parametrize("source", ["ef", "mc"])
def test_a_saved_state_goes_on_identically(source: str, tmp_path: Any):
    case, model, batches = prepare("vision-transformer", (4, 3, 4, 4, 2, 3))
    options = {"source": source, "every": 2, "decay": 0.6}

    def run(online: OnlineCurvature, part: list[Any]) -> None:
        for batch in part:
            with online.watch():
                nlls(case, model, batch).mean().backward()

    whole = watch(model, **options)
    run(whole, batches)
    whole.close()
    first = watch(model, **options)
    run(first, batches[:3])
    save_state(tmp_path / "state", first.state_dict())
    first.close()
    second = watch(model, **options, seed=9)
    second.load_state_dict(load_state(tmp_path / "state"))
    assert_all_same(second.curvature().diagonal(), first.curvature().diagonal(), 0.0)  # before it has seen anything
    assert second.curvature().rules == first.curvature().rules
    run(second, batches[3:])
    assert (second.steps, second.looks, second.weight) == (whole.steps, whole.looks, whole.weight)
    assert second.curvature().log_likelihood == whole.curvature().log_likelihood
    for name, h in whole.curvature().diagonal().items():
        assert torch.equal(second.curvature().diagonal()[name], h), name


# Other losses ----------------------------------------------------------------------------------------------------

UNREADABLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "label smoothing": lambda f, y: F.cross_entropy(f, y, label_smoothing=0.1),
    "class weights": lambda f, y: F.cross_entropy(f, y, weight=torch.tensor([1.0, 2.0, 4.0]).to(f)),
    "a further term": lambda f, y: F.cross_entropy(f, y) + 0.1 * f.square().mean(),
    "probabilities": lambda f, y: F.nll_loss(f.softmax(1).log().softmax(1), y),
    "the wrong sign": lambda f, y: -F.cross_entropy(f, y),
}


@pytest.mark.parametrize("source", ["ef", "mc"])
@pytest.mark.parametrize("loss", UNREADABLE)
def test_a_loss_that_cannot_be_read_says_what_to_do(loss: str, source: str):
    _, model, ((x, y),) = prepare("lenet", (9,))
    watch(model, source=source)
    with pytest.raises(ValueError, match=r'(?s)not a multiple of the cross entropy.*loss="mean".*source="mc"'):
        UNREADABLE[loss](model(x), y).backward()


@pytest.mark.parametrize("loss", UNREADABLE)
def test_mc_with_the_reduction_told_needs_no_reading(loss: str):
    case, model, ((x, y),) = prepare("lenet", (9,))
    plain = watch(model, source="mc")
    with plain.watch():
        nlls(case, model, (x, y)).mean().backward()
    plain.close()
    online = watch(model, source="mc", loss="mean")
    with online.watch():
        UNREADABLE[loss](model(x), y).backward()
    assert_all_same(online.curvature().diagonal(), plain.curvature().diagonal(), 0.0)
    assert online.weight == 1
    assert online.curvature().log_likelihood != online.curvature().log_likelihood, "nobody has told it: NaN"


@pytest.mark.parametrize(("loss", "weight"), [("mean", 1.0), ("sum", 7.0)])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_told_reduction_is_over_the_samples_of_a_step(loss: str, weight: float, scale: float):
    case, model, batches = prepare("regression", (4, 3))
    online = watch(model, likelihood=case.likelihood, loss=loss)
    for batch in batches:
        nll = nlls(case, model, batch)
        online.note(float(nll.detach().sum()))
        (scale * nll.sum() / (7 if loss == "mean" else 1)).backward()
    online.step(scale=scale)
    assert_step(online, case, batches)
    assert online.weight == pytest.approx(weight)


def test_confident_predictions_are_still_a_cross_entropy():
    """In float32, 1 − p of the label is rounded to a few digits or to nothing; the other classes keep theirs."""
    generator = torch.Generator().manual_seed(0)
    for gap in (5.0, 12.0, 16.0, 18.0, 40.0, 120.0):
        y = torch.randint(10, (64,), generator=generator)
        logits = torch.randn(64, 10, generator=generator) + gap * F.one_hot(y, 10)
        model = nn.Identity()
        model.shift = nn.Parameter(torch.zeros(10))
        model.forward = lambda x, m=model: x + m.shift  # type: ignore[method-assign, misc]
        online = watch(model)
        with online.watch():
            F.cross_entropy(model(logits), y).backward()
        if gap < 100:
            assert online.weight == pytest.approx(1, rel=1e-3), gap
        wanted = -float(F.cross_entropy(logits.double(), y)) * N
        assert online.curvature().log_likelihood == pytest.approx(wanted, rel=1e-2, abs=1e-4), gap


def test_one_output_is_no_classification():
    model = nn.Linear(3, 1)
    watch(model)
    with pytest.raises(ValueError, match="not a multiple of the cross entropy"):
        F.binary_cross_entropy_with_logits(model(torch.randn(6, 3)), torch.ones(6, 1)).backward()


# Mixed precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lenet", "transformer-block", "vision-transformer", "attention-batch-first"])
@pytest.mark.parametrize("source", ["ef", "mc"])
def test_autocast_gives_nearly_the_same_numbers_by_the_same_rules(name: str, source: str):
    _case, model, (batch,) = prepare(name, (8,))
    model.float()
    x, y = batch[0].float(), batch[1]
    found = []
    for enabled in (False, True):
        online = watch(model, source=source, seed=2)
        model.zero_grad()
        # without oneDNN: its bfloat16 kernels do not run on every CPU that claims them
        with torch.backends.mkldnn.flags(enabled=False):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = F.cross_entropy(model(x), y)
            with online.watch():
                (1024 * loss).backward()
        found.append(online.curvature())
        online.close()
    exact, mixed = found
    assert exact.rules == mixed.rules
    for parameter, h in exact.diagonal().items():
        other = mixed.diagonal()[parameter]
        assert other.dtype == torch.float32
        assert float((other - h).norm() / h.norm()) < 0.15, parameter
    assert mixed.log_likelihood == pytest.approx(exact.log_likelihood, rel=0.05)


def test_infinite_gradients_are_an_error_that_names_the_parameter():
    case, model, (batch,) = prepare("mlp")
    online = watch(model, loss="mean")
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"'0.weight'.*not finite at step 1"), online.watch():
        nlls(case, model, batch).mean().backward()


def test_a_step_that_the_scaler_will_skip_is_not_looked_at():
    case, model, batches = prepare("mlp", (4, 4))
    online = watch(model, decay=0.5)
    with online.watch():
        nlls(case, model, batches[0]).mean().backward()
    before = {"average": {n: h.clone() for n, h in online.average.items()}, "weight": online.weight}
    (nlls(case, model, batches[1]).mean() * float("inf")).backward()
    assert not online.step(scale=1024.0)
    assert online.looks == 1
    assert online.weight == before["weight"]
    assert_all_same(online.average, before["average"], 0.0)


# Bad input -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"source": "ggn"}, "online source"),
        ({"loss": "median"}, "mean"),
        ({"data_size": 0}, "data_size=0"),
        ({"every": 0}, "every=0"),
        ({"decay": 1.0}, r"decay=1\.0"),
    ],
)
def test_bad_options_are_named(options: dict[str, Any], message: str):
    with pytest.raises(ValueError, match=message):
        watch(nn.Linear(2, 2), **options)


def test_a_model_without_trainable_parameters():
    with pytest.raises(ValueError, match="no trainable parameter"):
        watch(nn.Linear(2, 2).requires_grad_(False))
