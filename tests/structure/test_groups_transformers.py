"""The groups of transformers: heads and hidden units, whatever the layout of the projections."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shaver.batches import forward_of
from shaver.structure import Group, Groups, find_groups
from tests.curvature import languages
from tests.structure.silencing import check_units, randomised


def index(group: Group, tensor: str) -> Tensor:
    return next(piece.index for piece in group.slices if piece.tensor.endswith(tensor))


def summary(groups: Groups) -> list[tuple[str, str, int]]:
    return [(name, group.kind, group.units) for name, group in groups.items()]


EXPECTED = {
    "bert": [
        ("bert.encoder.layer.0.attention", "heads", 2),
        ("bert.encoder.layer.0.intermediate.dense", "hidden", 12),
        ("bert.pooler.dense", "hidden", 8),
    ],
    "distilbert": [
        ("distilbert.transformer.layer.0.attention", "heads", 2),
        ("distilbert.transformer.layer.0.ffn.lin1", "hidden", 12),
        ("pre_classifier", "hidden", 8),
    ],
    "gpt2": [("transformer.h.0.attn", "heads", 2), ("transformer.h.0.mlp.c_fc", "hidden", 12)],
    "llama": [("model.layers.0.self_attn", "heads", 2), ("model.layers.0.mlp", "hidden", 12)],
}
MODELS = [
    *((name, False, make) for name, make in languages.CLASSIFIERS.items()),
    *((name, True, make) for name, make in languages.CAUSAL.items()),
]


@pytest.mark.parametrize(("name", "causal", "make"), MODELS, ids=[f"{n} {'lm' if c else ''}" for n, c, _ in MODELS])
def test_language_models_have_heads_and_hidden_units(name: str, causal: bool, make: Any) -> None:
    model, batch = languages.build(make), languages.tokens(2, causal)
    groups = find_groups(model, batch)
    assert summary(groups) == EXPECTED[name.removesuffix(" tied")]
    assert model.training
    model.eval()
    check_units(model, groups, lambda model: forward_of(model, batch))


def test_separate_projections_lose_the_same_rows() -> None:
    model = languages.build(languages.CLASSIFIERS["bert"])
    heads = find_groups(model, languages.tokens(2, False))["bert.encoder.layer.0.attention"]
    assert [piece.role for piece in heads.slices] == ["makes"] * 6 + ["reads"]
    for piece in heads.slices:
        assert torch.equal(piece.index, torch.arange(8).reshape(2, 4))


def test_a_transposed_linear_layer_has_its_outputs_along_the_second_dimension() -> None:
    model = languages.build(languages.CAUSAL["gpt2"])
    groups = find_groups(model, languages.tokens(2, True))
    hidden = groups["transformer.h.0.mlp.c_fc"]
    assert [(p.tensor.split("mlp.")[1], p.dim, p.role) for p in hidden.slices] == [
        ("c_fc.weight", 1, "makes"), ("c_fc.bias", 0, "makes"), ("c_proj.weight", 0, "reads"),
    ]  # fmt: skip
    packed = index(groups["transformer.h.0.attn"], "c_attn.weight")
    assert torch.equal(packed, torch.arange(24).reshape(3, 2, 4).transpose(0, 1).reshape(2, 12))


def test_a_key_and_value_head_goes_with_all_queries_that_share_it() -> None:
    model = languages.build(languages.CAUSAL["llama"])
    heads = find_groups(model, languages.tokens(2, True))["model.layers.0.self_attn"]
    assert index(heads, "q_proj.weight").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert index(heads, "k_proj.weight").tolist() == index(heads, "v_proj.weight").tolist() == [[0, 1], [2, 3]]
    assert index(heads, "o_proj.weight").tolist() == [[0, 1, 2, 3], [4, 5, 6, 7]]


def test_a_gate_goes_with_what_it_gates() -> None:
    model = languages.build(languages.CAUSAL["llama"])
    hidden = find_groups(model, languages.tokens(2, True))["model.layers.0.mlp"]
    assert {p.tensor.split(".")[-2]: (p.dim, p.role) for p in hidden.slices} == {
        "gate_proj": (0, "makes"), "up_proj": (0, "makes"), "down_proj": (1, "reads"),
    }  # fmt: skip


@pytest.mark.parametrize("causal", [False, True])
def test_embeddings_and_the_tied_output_are_left_alone(causal: bool) -> None:
    make = languages.CAUSAL["llama tied"] if causal else languages.CLASSIFIERS["bert"]
    model = languages.build(make)
    groups = find_groups(model, languages.tokens(2, causal), residual=True)
    tensors = {piece.tensor for group in groups.values() for piece in group.slices}
    assert not {name for name in tensors if "embed" in name or "lm_head" in name}


@pytest.mark.parametrize("batch_first", [False, True])
def test_the_encoder_of_torch_has_packed_heads(batch_first: bool) -> None:
    layer = nn.TransformerEncoderLayer(12, 3, 10, batch_first=batch_first, activation="gelu")
    encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    model = randomised(nn.Sequential(encoder, nn.Linear(12, 4)))
    x = torch.randn(5, 4, 12, dtype=torch.float64)
    fast = torch.backends.mha.get_fastpath_enabled()
    groups = find_groups(model, x)
    assert torch.backends.mha.get_fastpath_enabled() == fast
    assert summary(groups) == [
        (name, kind, units)
        for n in range(2)
        for name, kind, units in ((f"0.layers.{n}.self_attn", "heads", 3), (f"0.layers.{n}.linear1", "hidden", 10))
    ]
    check_units(model, groups, lambda model: model(x))


class Crossed(nn.Module):
    """Attention whose keys and values come from elsewhere, have other widths, and one more of each."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, kdim=6, vdim=5, add_bias_kv=True, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor, y: Tensor, z: Tensor) -> Tensor:
        out: Tensor = self.head(self.attention(x, y, z)[0])
        return out


def test_attention_over_other_inputs_has_heads_too() -> None:
    model = randomised(Crossed())
    x, y, z = (torch.randn(2, 3, width, dtype=torch.float64) for width in (8, 6, 5))
    groups = find_groups(model, (x, y, z))
    assert [p.tensor.split(".")[-1] for p in groups["attention"].slices if p.role == "makes"] == [
        "q_proj_weight", "k_proj_weight", "v_proj_weight", "in_proj_bias", "bias_k", "bias_v",
    ]  # fmt: skip
    # What leaves the attention module goes to one layer alone, so that its channels are units as well.
    assert sorted(summary(groups)) == [("attention", "heads", 2), ("attention.out_proj", "hidden", 8)]
    check_units(model, groups, lambda model: model(x, y, z))


class NormedHeads(nn.Module):
    """Queries and keys are normalised over the width of a head, with one scale for all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(6, 36)
        self.query_norm, self.key_norm = nn.RMSNorm(4), nn.LayerNorm(4)
        self.out = nn.Linear(12, 2)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 4)).permute(2, 0, 3, 1, 4)
        q, k = self.query_norm(q), self.key_norm(k)
        mixed = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


def test_a_norm_that_all_heads_share_belongs_to_none() -> None:
    model = randomised(NormedHeads())
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    groups = find_groups(model, x)
    assert summary(groups)[0][1:] == ("heads", 3)
    assert {p.tensor for p in next(iter(groups.values())).slices} == {"qkv.weight", "qkv.bias", "out.weight"}
    check_units(model, groups, lambda model: model(x))
