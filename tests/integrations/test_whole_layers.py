"""Whole layers of a causal model: which are removed, what the others do, and the shallower model."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shaver.integrations import oneshot
from shaver.integrations.causal_blocks import find_blocks
from shaver.integrations.oneshot import OneShot, prune_blocks
from shaver.integrations.whole_layers import drop_layers, find_layers, passing
from tests.integrations.causal_models import FAMILIES, transformers, windows

LAYERS = 5


def build(name: str, seed: int = 0, **settings: Any) -> Any:
    kind, config = FAMILIES[name]
    config = type(config)(
        **(config.to_dict() | {"layer_types": None, "num_hidden_layers": LAYERS, "n_layer": LAYERS} | settings)
    )
    torch.manual_seed(seed)
    model = getattr(transformers, kind)(config).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    return model


def loss(model: Any, tokens: Tensor) -> float:
    with torch.no_grad():
        logits = model(tokens, use_cache=False).logits[:, :-1].flatten(0, 1)
    return float(nn.functional.cross_entropy(logits, tokens[:, 1:].flatten()))


def without(model: Any, removed: tuple[int, ...]) -> Any:
    """The model that plain slicing of the list of blocks gives."""
    small = deepcopy(model)
    holder = small.transformer if hasattr(small, "transformer") else small.model
    name = "h" if hasattr(holder, "h") else "layers"
    setattr(holder, name, nn.ModuleList(b for i, b in enumerate(getattr(holder, name)) if i not in removed))
    small.config.num_hidden_layers = LAYERS - len(removed)
    if getattr(small.config, "layer_types", None):
        small.config.layer_types = [kind for i, kind in enumerate(small.config.layer_types) if i not in removed]
    return small


@pytest.mark.parametrize("name", FAMILIES)
def test_each_time_the_layer_is_removed_without_which_the_loss_is_lowest(name: str) -> None:
    model, tokens = build(name), windows(12)
    removed: tuple[int, ...] = ()
    for _ in range(2):
        rest = [number for number in range(LAYERS) if number not in removed]
        losses = {number: loss(without(model, (*removed, number)), tokens) for number in rest}
        removed = (*removed, min(rest, key=lambda number: losses[number]))
    before = deepcopy(model.state_dict())
    assert find_layers(find_blocks(model), tokens, 2) == tuple(sorted(removed))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert not any("forward" in vars(module) for module in model.modules())


@pytest.mark.parametrize("name", FAMILIES)
def test_without_repair_the_shallower_model_is_the_others_unchanged_and_generates_with_a_cache(name: str) -> None:
    model = build(name, 1)
    dense, config = deepcopy(model), model.config
    steps: list[tuple[int, int]] = []
    rows = prune_blocks(
        model, windows(), OneShot(sparsity=0.4, layers=True, repair=False), progress=lambda *step: steps.append(step)
    )
    assert steps == [(number, 14) for number in range(1, 15)]  # 5 + 4 layers tried, 5 blocks
    removed = tuple(sorted({int(row.name.split(".")[2]) for row in rows if not row.kept}))
    assert len(removed) == 2
    assert (config.num_hidden_layers, model.config.num_hidden_layers) == (LAYERS, 3)
    tokens = windows(2, 6)
    with torch.no_grad():
        torch.testing.assert_close(
            model(tokens).logits, without(dense, removed)(tokens, use_cache=False).logits, rtol=1e-5, atol=1e-5
        )
    fast, slow = (model.generate(tokens, max_new_tokens=12, do_sample=False, use_cache=use) for use in (True, False))
    assert fast.tolist() == slow.tolist()
    again = type(model)(model.config).eval()
    again.load_state_dict(model.state_dict())
    with torch.no_grad():
        torch.testing.assert_close(again(tokens).logits, model(tokens).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_layers_after_a_removed_one_bring_the_outputs_nearer_to_the_dense_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oneshot, "find_layers", lambda *_: (1,))
    dense, tokens = build(name, 2), windows(60, seed=7)
    errors = []
    for repair in (False, True):
        model = deepcopy(dense)
        rows = prune_blocks(model, tokens, OneShot(sparsity=0.2, layers=True, repair=repair))
        assert sum(row.kept for row in rows) == 0.8 * sum(row.weights for row in rows)
        with torch.no_grad():
            errors.append(float((model(tokens).logits - dense(tokens).logits).square().mean()))
    assert errors[1] < errors[0]


def test_layers_before_the_first_removed_one_stay_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(oneshot, "find_layers", lambda *_: (2,))
    model = build("llama", 3)
    before = deepcopy(model.state_dict())
    prune_blocks(model, windows(), OneShot(sparsity=0.2, layers=True))
    changed = {key.split(".")[2] for key, value in model.state_dict().items() if not torch.equal(value, before[key])}
    assert changed == {"2", "3"}  # the fourth and the fifth, at their new places


def test_kinds_of_attention_follow_their_layers() -> None:
    kinds = ["sliding_attention", "full_attention", "sliding_attention", "full_attention", "full_attention"]
    model = build("qwen2", 4, use_sliding_window=True, sliding_window=4, layer_types=kinds)
    tokens = windows(3)
    chain = find_blocks(model)
    with torch.no_grad(), passing(chain, {0: None, 3: None}):
        expected = model(tokens, use_cache=False).logits
    drop_layers(chain, (0, 3))
    assert model.config.layer_types == ["full_attention", "sliding_attention", "full_attention"]
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == [0, 1, 2]
    with torch.no_grad():
        torch.testing.assert_close(model(tokens).logits, expected)


def test_bfloat16_stays_bfloat16() -> None:
    model = build("mistral").bfloat16()
    prune_blocks(model, windows(), OneShot(sparsity=0.2, layers=True))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert bool(model(windows()).logits.isfinite().all())


def test_what_cannot_be_removed_is_refused_and_nothing_changes() -> None:
    model = build("gpt2", scale_attn_by_inverse_layer_idx=True)
    before = deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"attn\.scaling depends on a layer's place.*units=True"):
        prune_blocks(model, windows(), OneShot(sparsity=0.4, layers=True))
    with pytest.raises(ValueError, match=r"0\.05 of 5 layers is not one layer"):
        prune_blocks(model, windows(), OneShot(sparsity=0.05, layers=True))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    for settings in ({"pattern": (2, 4)}, {"sparsity": 0.5, "units": True}, {"sparsity": 0.5, "criterion": "wanda"}):
        with pytest.raises(ValueError, match="layers"):
            OneShot(layers=True, **settings)
