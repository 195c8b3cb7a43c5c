"""Fine-tuning keeps the zeros of a pruned model, with the Trainer and with adapters; adapters lose ranks and reopen."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shaver
from shaver.integrations.oneshot import OneShot, prune_blocks
from shaver.integrations.sparse_tuning import KeepZeros, by_rank, hold_adapters, merge_adapters, rank_groups, zero_masks
from shaver.integrations.transformers import SpaMCallback
from tests.integrations.causal_models import build, transformers, windows


def pruned(name: str) -> Any:
    model = build(name)
    prune_blocks(model, windows(), OneShot(sparsity=0.5, criterion="magnitude", repair=False))
    return model


def train(model: Any, folder: Path, *callbacks: Any) -> None:
    rows = [{"input_ids": row, "labels": row} for row in windows(16, 8, seed=2)]
    arguments = transformers.TrainingArguments(
        str(folder), per_device_train_batch_size=4, num_train_epochs=2, learning_rate=0.05, weight_decay=0.0,
        save_strategy="no", report_to=[], use_cpu=True, disable_tqdm=True,
    )  # fmt: skip
    transformers.Trainer(model, arguments, train_dataset=rows, callbacks=list(callbacks)).train()


def adapted(model: nn.Module, name: str, **options: Any) -> Any:
    peft = pytest.importorskip("peft")
    targets = ["c_attn", "c_fc"] if name == "gpt2" else ["q_proj", "down_proj"]
    config = peft.LoraConfig(
        r=4, lora_alpha=8, target_modules=targets, fan_in_fan_out=name == "gpt2", task_type="CAUSAL_LM", **options
    )
    torch.manual_seed(3)
    model = peft.get_peft_model(model, config)
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "lora_B" in key:
                parameter.normal_(0, 0.1)
    return model


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_the_trainer_keeps_the_zeros_and_trains_the_rest(name: str, tmp_path: Path) -> None:
    model = pruned(name)
    before, masks = deepcopy(model.state_dict()), zero_masks(model)
    train(model, tmp_path, KeepZeros())
    for key, mask in masks.items():
        weight = model.get_parameter(key)
        assert bool((weight[~mask] == 0).all())
        assert not torch.equal(weight, before[key])


def test_a_dense_model_has_no_zeros_to_keep() -> None:
    with pytest.raises(ValueError, match=r"no weight matrix of LlamaForCausalLM has 1% of zeros"):
        zero_masks(build("llama"))


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_merging_adapters_keeps_the_zeros_and_the_function(name: str, tmp_path: Path) -> None:
    model = pruned(name)
    masks = zero_masks(model)
    tuned = adapted(model, name)
    assert hold_adapters(tuned) == 4
    assert hold_adapters(tuned) == 0  # once is enough
    train(tuned, tmp_path, KeepZeros())
    tuned.eval()
    with torch.no_grad():
        expected = deepcopy(tuned)(windows(3)).logits
    merged: Any = merge_adapters(tuned).eval()
    for key, mask in masks.items():
        assert bool((merged.get_parameter(key)[~mask] == 0).all())
    with torch.no_grad():
        torch.testing.assert_close(merged(windows(3)).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("rslora", [False, True])
def test_adapters_of_smaller_rank_are_opened_by_peft(rslora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = build("llama")
    model = adapted(deepcopy(base), "llama", use_rslora=rslora).eval()
    example = {"input_ids": windows(2)}
    ranks = rank_groups(model, example)
    assert len(ranks) == 4
    with pytest.raises(ValueError, match="no low-rank adapters"):
        rank_groups(base, example)
    small = shaver.compact(model, example, criterion="magnitude", sparsity=0.5, groups=ranks).eval()
    small.save_pretrained(tmp_path)
    again = peft.PeftModel.from_pretrained(deepcopy(base), tmp_path).eval()
    layer = again.base_model.model.model.layers[0].self_attn.q_proj
    assert layer.lora_A["default"].weight.shape == (2, 32)
    with torch.no_grad():
        torch.testing.assert_close(again(**example).logits, small(**example).logits, rtol=1e-5, atol=1e-5)
    assert model.peft_config["default"].rank_pattern == {}  # the model given is left alone


def test_the_evidence_learns_one_precision_per_rank(tmp_path: Path) -> None:
    model = adapted(build("llama"), "llama")
    callback = SpaMCallback(prior=by_rank, every=1, update=2, burn_in=0.0)
    train(model, tmp_path, callback)
    deltas = callback.posterior.delta()
    assert {key.split(".lora_")[1][0] for key in deltas} == {"A", "B"}
    for key, delta in deltas.items():
        along = delta.expand(model.get_parameter(key).shape)
        if "lora_B" in key:
            along = along.t()
        assert bool((along == along[:, :1]).all())
        assert len(along) == 4
    assert len(torch.unique(torch.cat([delta.flatten() for delta in deltas.values()]))) > 4
