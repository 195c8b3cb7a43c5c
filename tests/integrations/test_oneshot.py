"""One-shot pruning block by block: what is removed, what the rest does, and what each layer was fitted to."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shaver.integrations.block_moments import find_stages, matrix, stage_moments
from shaver.integrations.causal_blocks import find_blocks
from shaver.integrations.oneshot import OneShot, prune_blocks
from tests.integrations.causal_models import FAMILIES, build, transformers, windows


def matrices(model: nn.Module, rows: Any) -> list[Tensor]:
    return [matrix(model.get_submodule(row.name.removesuffix(".weight"))) for row in rows]


@pytest.mark.parametrize("criterion", ["opd", "wanda", "magnitude"])
@pytest.mark.parametrize("name", FAMILIES)
def test_every_matrix_of_every_block_loses_the_share_and_nothing_else_changes(name: str, criterion: Any) -> None:
    model = build(name, 0)
    dense = deepcopy(model)
    rows = prune_blocks(model, windows(), OneShot(sparsity=0.5, criterion=criterion))
    assert len(rows) == (8 if name == "gpt2" else 14)
    pruned = {row.name for row in rows}
    for row, weight in zip(rows, matrices(model, rows), strict=True):
        assert abs(int((weight == 0).sum()) - weight.numel() / 2) <= len(weight)
        assert row.kept == int((weight != 0).sum())
    for key, parameter in model.named_parameters():
        if key not in pruned:
            torch.testing.assert_close(parameter, dense.get_parameter(key), rtol=0, atol=0)
    assert bool(model(windows()).logits.isfinite().all())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("criterion", ["opd", "wanda", "magnitude"])
def test_two_of_four_neighbours_along_the_inputs_stay(name: str, criterion: Any) -> None:
    model = build(name, 1)
    rows = prune_blocks(model, windows(), OneShot(pattern=(2, 4), criterion=criterion))
    for weight in matrices(model, rows):
        kept = (weight != 0).reshape(len(weight), -1, 4).sum(2)
        assert bool((kept == 2).all())


@pytest.mark.parametrize("name", FAMILIES)
def test_the_repair_lowers_the_error_of_the_first_layers(name: str) -> None:
    """The first stage reads the same inputs in all calls, so that its errors can be compared."""
    stage = 1 if name == "gpt2" else 3
    errors = {}
    for criterion, repair in (("opd", True), ("wanda", True), ("wanda", False)):
        rows = prune_blocks(build(name), windows(40), OneShot(sparsity=0.5, criterion=criterion, repair=repair))  # type: ignore[arg-type]
        errors[criterion, repair] = sum(row.error for row in rows[:stage])
    assert max(errors["opd", True], errors["wanda", True]) < errors["wanda", False]


@pytest.mark.parametrize("name", FAMILIES)
def test_moments_are_those_of_the_inputs_of_the_block_as_it_is_now(name: str) -> None:
    model = build(name, 2)
    chain, tokens = find_blocks(model), windows(6)
    hidden, block, call = chain.entering(tokens), chain.blocks[0], chain.calls(tokens)[0]
    with torch.no_grad():
        states = [hidden.clone()]
        found = {}
        for stage, moments in stage_moments(block, find_stages(block, call, hidden), [call], states):
            found[stage.paths[0]] = moments
            for path in stage.paths:
                matrix(block.get_submodule(path)).mul_(0.5)  # in force for the stages after this one
        seen: dict[str, Tensor] = {}
        handles = [
            block.get_submodule(path).register_forward_pre_hook(
                lambda _, args, path=path: seen.__setitem__(path, args[0].reshape(-1, args[0].shape[-1]).double())
            )
            for path in found
        ]
        after = call(block, hidden)
        for handle in handles:
            handle.remove()
    assert len(found) == 4
    for path, moments in found.items():
        expected = seen[path].t() @ seen[path]
        torch.testing.assert_close(moments.second, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))
        assert moments.rows == tokens.numel()
    torch.testing.assert_close(states[0], after, rtol=1e-4, atol=1e-5)


def test_a_dense_target_adds_the_drift_of_the_residual_stream() -> None:
    model = build("llama", 3)
    chain, tokens = find_blocks(model), windows(6)
    dense = chain.entering(tokens)
    present = dense + 0.3 * torch.randn(dense.shape, generator=torch.Generator().manual_seed(4))
    block, call = chain.blocks[0], chain.calls(tokens)[0]
    stages = find_stages(block, call, dense)
    assert [dict(stage.residual) for stage in stages] == [
        {}, {"self_attn.o_proj": ""}, {}, {"mlp.down_proj": "post_attention_layernorm"},
    ]  # fmt: skip
    seen: list[list[Tensor]] = []
    with torch.no_grad():
        found = [m for _, m in stage_moments(block, stages, [call], [present.clone()], [dense.clone()])]
        for hidden in (dense, present):
            own: dict[str, Tensor] = {}
            paths = ("mlp.down_proj", "post_attention_layernorm")
            handles = [
                block.get_submodule(path).register_forward_pre_hook(
                    lambda _, args, path=path, own=own: own.__setitem__(path, args[0].flatten(0, 1).double())
                )
                for path in paths
            ]
            call(block, hidden)
            for handle in handles:
                handle.remove()
            seen.append([own[path] for path in paths])
    (dense_x, dense_h), (x, h) = seen
    for sums, expected in (
        (found[-1].cross, dense_x.t() @ x),
        (found[-1].drift["mlp.down_proj"], (dense_h - h).t() @ x),
    ):
        torch.testing.assert_close(sums, expected, rtol=1e-4, atol=1e-4 * float(expected.abs().max()))


def test_without_a_drift_the_dense_target_changes_nothing_in_the_first_layers() -> None:
    models = [build("gpt2", 5), build("gpt2", 5)]
    for model, is_dense in zip(models, (False, True), strict=True):
        prune_blocks(model, windows(40), OneShot(sparsity=0.5, dense_target=is_dense))
    first, second = (matrix(model.transformer.h[0].attn.c_attn) for model in models)  # type: ignore[union-attr, union-attr]
    assert bool(((first == 0) == (second == 0)).float().mean() > 0.99)  # ties in the last digits aside
    torch.testing.assert_close(first, second, rtol=0, atol=0.05 * float(first.abs().max()))


def test_bfloat16_stays_bfloat16_and_later_blocks_read_the_rounded_weights() -> None:
    model = build("qwen2").bfloat16()
    rows = prune_blocks(model, windows(), OneShot(sparsity=0.5))
    for weight in matrices(model, rows):
        assert weight.dtype == torch.bfloat16
        assert float((weight == 0).float().mean()) == pytest.approx(0.5, abs=0.01)


def test_padding_and_a_cache_work_on_the_pruned_model() -> None:
    model: Any = build("llama, tied")
    prune_blocks(model, windows(), OneShot(pattern=(2, 4)))
    assert model.lm_head.weight is model.model.embed_tokens.weight
    tokens = windows(2, 6)
    padded = torch.cat([torch.zeros(2, 3, dtype=torch.long), tokens], 1)
    mask = torch.ones_like(padded)
    mask[:, :3] = 0
    plain = model.generate(tokens, max_new_tokens=5, do_sample=False)
    shifted = model.generate(padded, attention_mask=mask, max_new_tokens=5, do_sample=False)
    slow = model.generate(tokens, max_new_tokens=5, do_sample=False, use_cache=False)
    assert plain[:, 6:].tolist() == shifted[:, 9:].tolist() == slow[:, 6:].tolist()


def _bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=50, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48
    )
    return transformers.BertLMHeadModel(config).eval()


def _t5() -> nn.Module:
    config = transformers.T5Config(d_model=32, d_kv=8, d_ff=24, num_layers=2, num_heads=4, vocab_size=50)
    return transformers.T5ForConditionalGeneration(config).eval()


@pytest.mark.parametrize(("make", "said"), [(_bert, "not causal"), (_t5, "cannot be called|not known")])
def test_other_families_are_refused_and_the_message_says_what_works(make: Any, said: str) -> None:
    model = make()
    before = deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=rf"({said}).*Llama, Qwen2, Mistral and GPT-2.*shaver\.prune"):
        prune_blocks(model, windows(), OneShot(sparsity=0.5))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


@pytest.mark.parametrize(
    ("tokens", "said"),
    [
        (torch.zeros(0, 8, dtype=torch.long), "shape"),
        (torch.zeros(2, 8), "token ids"),
        (torch.full((2, 8), 50), "vocabulary has 50"),
        (torch.full((2, 8), -1), "vocabulary has 50"),
        (torch.zeros(2, 65, dtype=torch.long), "longer than the 64"),
    ],
)
def test_windows_that_do_not_fit_are_refused(tokens: Tensor, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        prune_blocks(build("llama"), tokens, OneShot(sparsity=0.5))


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({}, "either sparsity=0.5 or pattern"),
        ({"sparsity": 0.5, "pattern": (2, 4)}, "either"),
        ({"sparsity": 1.5}, "1.5"),
        ({"pattern": (4, 2)}, "4, 2"),
        ({"sparsity": 0.5, "criterion": "wonda"}, "wanda"),
        ({"sparsity": 0.5, "damping": 0.0}, "damping"),
    ],
)
def test_settings_out_of_range_are_refused(settings: Any, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        OneShot(**settings)
