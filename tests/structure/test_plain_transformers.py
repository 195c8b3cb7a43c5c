"""Compact models of the transformers library are opened by plain transformers, in a process without shaver."""

import json
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shaver
from shaver.structure import find_groups, kept_units, remove_units

transformers = pytest.importorskip("transformers")

_TEXT: dict[str, Any] = {"vocab_size": 50, "max_position_embeddings": 40, "num_hidden_layers": 2}
_ENDS: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
_WIDE: dict[str, Any] = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 24}
_LLAMA: dict[str, Any] = _TEXT | _WIDE | _ENDS | {"num_key_value_heads": 2}
_T5: dict[str, Any] = {"d_model": 32, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_heads": 4, "vocab_size": 50}


def built(kind: str, config: Any, **inputs: Any) -> Callable[[], tuple[nn.Module, dict[str, Tensor]]]:
    def build() -> tuple[nn.Module, dict[str, Tensor]]:
        torch.manual_seed(0)
        model = getattr(transformers, kind)(config).eval()
        with torch.no_grad():
            for parameter in model.parameters():  # biases and norms, too, must not be trivial
                parameter.add_(0.1 * torch.randn_like(parameter))
        ids = torch.randint(3, 50, (3, 9), generator=torch.Generator().manual_seed(1))
        mask = torch.ones_like(ids)
        mask[0, 6:] = 0  # one sample is padded
        return model, {"input_ids": ids, "attention_mask": mask} | inputs

    return build


def _images() -> tuple[nn.Module, dict[str, Tensor]]:
    config = transformers.ViTConfig(**_WIDE, num_hidden_layers=2, image_size=8, patch_size=4)
    model, _ = built("ViTForImageClassification", config)()
    return model, {"pixel_values": torch.randn(3, 3, 8, 8, generator=torch.Generator().manual_seed(1))}


#: Name → the class that opens it, how it is built, and entries of the small configuration.
FAMILIES: dict[str, tuple[str, Callable[[], tuple[nn.Module, dict[str, Tensor]]], dict[str, int]]] = {
    "bert": (
        "AutoModelForSequenceClassification",
        built("BertForSequenceClassification", transformers.BertConfig(**_TEXT, **_WIDE)),
        {"intermediate_size": 12, "num_attention_heads": 4},
    ),
    "distilbert": (
        "AutoModelForSequenceClassification",
        built(
            "DistilBertForSequenceClassification",
            transformers.DistilBertConfig(vocab_size=50, dim=32, n_layers=2, n_heads=4, hidden_dim=24),
        ),
        {"hidden_dim": 12, "n_heads": 4},
    ),
    "roberta": (
        "AutoModelForSequenceClassification",
        built("RobertaForSequenceClassification", transformers.RobertaConfig(**_TEXT, **_WIDE, **_ENDS)),
        {"intermediate_size": 12, "num_attention_heads": 4},
    ),
    "gpt2": (
        "AutoModelForCausalLM",
        built(
            "GPT2LMHeadModel",
            transformers.GPT2Config(vocab_size=50, n_embd=32, n_layer=2, n_head=4, n_positions=40, **_ENDS),
        ),
        {"n_inner": 64, "n_head": 4},
    ),
    "llama": (
        "AutoModelForCausalLM",
        built("LlamaForCausalLM", transformers.LlamaConfig(**_LLAMA)),
        {"intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    ),
    "llama, tied": (
        "AutoModelForCausalLM",
        built("LlamaForCausalLM", transformers.LlamaConfig(**_LLAMA, tie_word_embeddings=True)),
        {"intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    ),
    "qwen2": (
        "AutoModelForCausalLM",
        built("Qwen2ForCausalLM", transformers.Qwen2Config(**_LLAMA)),
        {"intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    ),
    "mistral": (
        "AutoModelForCausalLM",
        built("MistralForCausalLM", transformers.MistralConfig(**_LLAMA)),
        {"intermediate_size": 12, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8},
    ),
    "phi3": (
        "AutoModelForCausalLM",
        built("Phi3ForCausalLM", transformers.Phi3Config(**_LLAMA)),
        {"intermediate_size": 12, "num_attention_heads": 4, "num_key_value_heads": 2},
    ),
    "vit": (
        "AutoModelForImageClassification",
        _images,
        {"intermediate_size": 12, "num_attention_heads": 2, "head_dim": 8},
    ),
    "t5": (
        "AutoModelForSeq2SeqLM",
        built(
            "T5ForConditionalGeneration",
            transformers.T5Config(**_T5, decoder_start_token_id=0),
            decoder_input_ids=torch.randint(3, 50, (3, 5), generator=torch.Generator().manual_seed(2)),
        ),
        {"d_ff": 12, "num_heads": 2, "d_kv": 8},
    ),
}

#: Opens every folder with plain transformers and writes the outputs beside the weights.
_SCRIPT = """
import json, sys
sys.modules["shaver"] = None
import torch, transformers
from pathlib import Path
from safetensors.torch import load_file, save_file
torch.set_num_threads(1)
for folder in map(Path, sys.argv[1:]):
    kind = json.loads((folder / "kind.json").read_text())
    model = getattr(transformers, kind).from_pretrained(folder).eval()
    with torch.no_grad():
        logits = model(**load_file(folder / "inputs.safetensors")).logits
    save_file({"logits": logits.contiguous()}, folder / "outputs.safetensors")
"""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[nn.Module, Path]]:
    """Family → the compact model and the folder that another process has opened."""
    place, models = tmp_path_factory.mktemp("models"), {}
    for name, (kind, build, _) in FAMILIES.items():
        model, inputs = build()
        small = shaver.compact(model, inputs, criterion="magnitude", sparsity=0.5)
        folder = place / name.replace(", ", "-")
        small.save_pretrained(folder)
        (folder / "kind.json").write_text(json.dumps(kind))
        save_file(inputs, folder / "inputs.safetensors")
        models[name] = (small, folder)
    folders = [str(folder) for _, folder in models.values()]
    subprocess.run([sys.executable, "-W", "ignore", "-c", _SCRIPT, *folders], check=True, cwd=place, timeout=600)
    return models


@pytest.mark.parametrize("name", FAMILIES)
def test_plain_transformers_opens_the_small_model_and_computes_the_same(name: str, opened: Any) -> None:
    small, folder = opened[name]
    with torch.no_grad():
        expected = small(**load_file(folder / "inputs.safetensors")).logits
    found = load_file(folder / "outputs.safetensors")["logits"]
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5 * float(expected.abs().max()))
    config = json.loads((folder / "config.json").read_text())
    wanted = FAMILIES[name][2]
    assert {key: config[key] for key in wanted} == wanted
    inner = [module.config for module in small.modules() if hasattr(module, "config")]
    assert all(getattr(own, key) == value for own in inner for key, value in wanted.items() if hasattr(own, key))


@pytest.mark.parametrize("name", ["gpt2", "llama", "qwen2", "mistral", "t5"])
def test_generation_with_a_cache_gives_the_logits_of_a_full_pass(name: str, opened: Any) -> None:
    small, folder = opened[name]
    inputs = {key: value[1:] for key, value in load_file(folder / "inputs.safetensors").items()}
    steps = small.generate(
        **{key: value for key, value in inputs.items() if key != "decoder_input_ids"},
        max_new_tokens=4, min_new_tokens=4, do_sample=False, return_dict_in_generate=True, output_logits=True,
    )  # fmt: skip
    assert steps.past_key_values is not None
    key = "decoder_input_ids" if name == "t5" else "input_ids"
    with torch.no_grad():
        if name == "t5":
            full = small(**inputs | {key: steps.sequences[:, :-1]}).logits
        else:
            full = small(steps.sequences[:, :-1]).logits[:, -4:]
    torch.testing.assert_close(torch.stack(steps.logits, 1), full, rtol=1e-4, atol=1e-5)


def test_free_widths_are_stored_by_shaver_and_save_pretrained_says_so(tmp_path: Path) -> None:
    model, inputs = FAMILIES["bert"][1]()
    config = deepcopy(model.config)
    small = shaver.compact(model, inputs, criterion="magnitude", sparsity=0.5, free_widths=True)
    assert small.bert.encoder.layer[0].attention.self.query.out_features == 16  # two of four heads
    for network in (small, deepcopy(small), small.bert):
        with pytest.raises(
            ValueError, match=r"no configuration of Bert.* shaver\.save\(model, folder\) stores the model"
        ):
            network.save_pretrained(tmp_path / "no")
    assert not (tmp_path / "no").exists()
    shaver.save(small, tmp_path / "own")
    again = shaver.load(tmp_path / "own", lambda: type(model)(config)).eval()
    with torch.no_grad():
        torch.testing.assert_close(again(**inputs).logits, small(**inputs).logits)


def test_a_model_without_a_head_is_compacted_and_opened(tmp_path: Path) -> None:
    model, inputs = FAMILIES["bert"][1]()
    small = shaver.compact(model.bert, inputs, criterion="magnitude", sparsity=0.5)
    small.save_pretrained(tmp_path)
    again = transformers.BertModel.from_pretrained(tmp_path).eval()
    with torch.no_grad():
        expected = small(**inputs).last_hidden_state
        torch.testing.assert_close(again(**inputs).last_hidden_state, expected, rtol=1e-5, atol=1e-5)
    assert again.config.intermediate_size == 12


def test_every_layer_keeps_the_same_widths_also_when_all_units_compete() -> None:
    model, inputs = FAMILIES["llama"][1]()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(3)  # its units would all stay
    for target in ("units", "parameters"):
        small = shaver.compact(model, inputs, criterion="magnitude", sparsity=0.3, target=target, spread="global")
        assert len({layer.mlp.up_proj.out_features for layer in small.model.layers}) == 1
        assert small.config.intermediate_size == small.model.layers[0].mlp.up_proj.out_features < 24
        assert "save_pretrained" not in vars(small)


def test_dead_units_are_removed_as_far_as_every_layer_has_them() -> None:
    model, inputs = FAMILIES["llama"][1]()
    with torch.no_grad():
        for layer, dead in zip(model.model.layers, (3, 5), strict=True):
            layer.mlp.down_proj.weight[:, :dead] = 0
    small = shaver.compact(model, inputs)
    assert [layer.mlp.up_proj.out_features for layer in small.model.layers] == [21, 21]
    assert small.config.intermediate_size == 21


def test_a_second_removal_that_evens_the_widths_makes_the_model_open_again(tmp_path: Path) -> None:
    model, inputs = FAMILIES["llama"][1]()
    groups = find_groups(model, inputs, kinds=["hidden"])
    first, second = groups
    uneven = remove_units(model, groups, {first: torch.arange(24) < 12}, inputs).model
    with pytest.raises(ValueError, match="no configuration"):
        uneven.save_pretrained(tmp_path / "no")
    again = find_groups(uneven, inputs, kinds=["hidden"])
    even = remove_units(uneven, again, {second: torch.arange(24) < 12}, inputs).model
    even.save_pretrained(tmp_path / "yes")
    assert json.loads((tmp_path / "yes" / "config.json").read_text())["intermediate_size"] == 12


def test_a_model_whose_configuration_expresses_no_group_is_refused() -> None:
    model, inputs = FAMILIES["bert"][1]()
    heads = find_groups(model, inputs, kinds=["heads"])
    with pytest.raises(ValueError, match=r"can express no other width of .*attention.*free_widths=True"):
        shaver.compact(model, inputs, criterion="magnitude", sparsity=0.5, groups=heads)
    alive = kept_units(heads, {name: parameter != 0 for name, parameter in model.named_parameters()})
    assert all(bool(keep.all()) for keep in alive.values())
