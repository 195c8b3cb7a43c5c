"""A measured model trains as without a measurement, and nothing is kept of it; a saved average goes on."""

import copy
import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from shaver.curvature import OnlineCurvature
from shaver.curvature import online as module
from shaver.io import load_state, save_state
from tests.curvature.cases import Case
from tests.curvature.online_cases import (
    CLASSIFIERS,
    assert_step,
    forward,
    nlls,
    online_for,
    prepare,
    without_noise,
)
from tests.curvature.reference import assert_all_same


@pytest.mark.parametrize("source", ["ef", "mc"])
@pytest.mark.parametrize("case", CLASSIFIERS, ids=lambda case: case.name)
def test_gradients_are_the_same(case: Case, source: str):
    model, batches = without_noise(case.model()), case.batches((4, 3))

    def gradients() -> list[Tensor | None]:
        model.zero_grad()
        for batch in batches:
            nlls(case, model, batch).mean().backward()
        return [p.grad for p in model.parameters()]

    alone = gradients()
    online = online_for(model, source=source, likelihood=case.likelihood)
    measured = gradients()
    online.step()
    rules = online.curvature().rules
    largest = max(float(old.abs().max()) for old in alone if old is not None)
    for (name, _parameter), old, new in zip(model.named_parameters(), alone, measured, strict=True):
        assert (old is None) == (new is None)
        if old is None or torch.equal(old, new):
            continue
        # with one copy per sample the sum over samples and positions is taken in another order
        assert rules[name] == "one copy per sample", name
        torch.testing.assert_close(new, old, rtol=1e-14, atol=1e-14 * largest)


def hooks_of(model: nn.Module) -> list[dict[str, Any]]:
    return [{k: dict(v) for k, v in vars(m).items() if "hook" in k and isinstance(v, dict)} for m in model.modules()]


@pytest.mark.parametrize("source", ["ef", "mc"])
def test_close_removes_every_hook(source: str):
    case, model, (batch,) = prepare("vision-transformer")
    model.block.register_forward_hook(lambda module, args, output: None)  # the user's own stays
    before, attributes = hooks_of(model), [set(vars(m)) for m in model.modules()]
    online = online_for(model, source=source)
    with online.measure():
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
    online = online_for(model)
    good = batch[0]
    for attempt in range(2):
        broken = model.head.register_forward_pre_hook(lambda module, args: 1 / 0 if not online._busy else None)
        with pytest.raises(ZeroDivisionError):
            model(good)
        broken.remove()
        assert "token" not in vars(model), attempt
        assert model.token is dict(model.named_parameters())["token"]
    with online.measure():
        nlls(case, model, batch).mean().backward()
    assert_step(online, case, [batch])


def test_torch_s_own_functions_are_in_place_whenever_the_model_is_not_running():
    """Packed attention is seen through ``F.linear``, which is torch's again after the pass, also after a failed one."""
    case, model, (batch,) = prepare("attention-batch-first")
    plain = F.linear
    online = online_for(model)
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


def test_a_copy_of_a_measured_model_is_not_measured():
    case, model, (batch, other) = prepare("vision-transformer", (4, 3))
    online = online_for(model)
    with online.measure():
        nlls(case, model, batch).mean().backward()
    before = online.curvature().diagonal()
    twin = copy.deepcopy(model)
    nlls(case, twin, other).mean().backward()
    assert not online.step()
    assert_all_same(online.curvature().diagonal(), before, 0.0)
    with online.measure():  # and the original still is
        nlls(case, model, other).mean().backward()
    assert_step(online, case, [other])


def test_a_step_keeps_nothing_of_its_passes(monkeypatch: pytest.MonkeyPatch):
    """Hooks in the autograd graph that know their pass, which knows the graph, would never be freed."""

    alive: list[weakref.ref[Any]] = []

    class Counted(module.Measurement):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            alive.append(weakref.ref(self))

    monkeypatch.setattr(module, "Measurement", Counted)
    case, model, (batch,) = prepare("called-twice")
    gc.disable()
    try:
        for source in ("ef", "mc"):
            online = online_for(model, source=source)
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
            with online.measure():
                nlls(case, model, batch).mean().backward()

    whole = online_for(model, **options)
    run(whole, batches)
    whole.close()
    first = online_for(model, **options)
    run(first, batches[:3])
    save_state(tmp_path / "state", first.state_dict())
    first.close()
    second = online_for(model, **options, seed=9)
    second.load_state_dict(load_state(tmp_path / "state"))
    assert_all_same(second.curvature().diagonal(), first.curvature().diagonal(), 0.0)  # before it has seen anything
    assert second.curvature().rules == first.curvature().rules
    run(second, batches[3:])
    assert (second.steps, second.measurements, second.weight) == (whole.steps, whole.measurements, whole.weight)
    assert second.curvature().log_likelihood == whole.curvature().log_likelihood
    for name, h in whole.curvature().diagonal().items():
        assert torch.equal(second.curvature().diagonal()[name], h), name


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("part", ["submodule", "whole"])
def test_a_compiled_model(backend: str, part: str):
    case, model, (batch,) = prepare("conv2d")
    body = nn.Sequential(model[:2], model[2:])
    (body[0] if part == "submodule" else body).compile(backend=backend)
    online = online_for(body)
    for _ in range(2):
        with online.measure():
            nlls(case, body, batch).mean().backward()
    assert_step(online, case, [batch])


def test_checkpointed_activations():
    """They are computed again in the backward pass, which is not a pass of its own."""

    class Checkpointed(nn.Module):
        def __init__(self, body: nn.Module) -> None:
            super().__init__()
            self.body = body

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(self.body, x, use_reentrant=False)  # type: ignore[no-any-return]

    case, model, (batch,) = prepare("conv2d")
    wrapped = Checkpointed(model)
    online = online_for(wrapped)
    with online.measure():
        nlls(case, wrapped, batch).mean().backward()
    assert_step(online, case, [batch])
