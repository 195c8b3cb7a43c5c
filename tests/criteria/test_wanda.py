"""Wanda against explicitly unfolded inputs."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import prune as torch_prune

from shaver.criteria import score

torch.manual_seed(0)
LABELS = torch.zeros(5, dtype=torch.long)


def run(model, *inputs):
    batches = [(x, LABELS[: len(x)]) for x in inputs]
    return score(model, "wanda", batches=batches, forward=lambda m, batch: m(batch[0]))


def test_linear_layers_over_samples_tokens_and_batches():
    layer = nn.Linear(4, 3)
    inputs = [torch.randn(5, 7, 4), torch.randn(2, 7, 4)]
    norms = torch.cat([x.reshape(-1, 4) for x in inputs]).norm(dim=0)
    torch.testing.assert_close(run(layer, *inputs)["weight"], layer.weight.detach().abs() * norms)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"stride": 2, "padding": 1},
        {"dilation": 2, "padding": 2},
        {"groups": 2},
        {"padding": 1, "padding_mode": "circular"},
        {"padding": "same"},
    ],
)
def test_convolutions_meet_each_input_entry(options):
    layer = nn.Conv2d(4, 6, 3, **options)
    x = torch.randn(5, 4, 8, 8)
    padding = options.get("padding", 0)
    padding = 1 if padding == "same" else padding
    mode = {"circular": "circular"}.get(options.get("padding_mode"), "constant")
    padded = F.pad(x, (padding,) * 4, mode=mode)
    patches = F.unfold(padded, 3, dilation=options.get("dilation", 1), stride=options.get("stride", 1))
    norms = patches.square().sum((0, 2)).sqrt().reshape(4, 3, 3)
    groups = options.get("groups", 1)
    norms = norms.reshape(groups, 4 // groups, 3, 3).repeat_interleave(6 // groups, 0)
    torch.testing.assert_close(run(layer, x)["weight"], layer.weight.detach().abs() * norms)


def test_one_and_three_dimensional_convolutions():
    for layer, x in [(nn.Conv1d(2, 3, 1), torch.randn(5, 2, 6)), (nn.Conv3d(2, 3, 1), torch.randn(5, 2, 3, 3, 3))]:
        norms = x.transpose(0, 1).flatten(1).norm(dim=1)
        expected = layer.weight.detach().abs() * norms.reshape(1, 2, *(1,) * (x.ndim - 2))
        torch.testing.assert_close(run(layer, x)["weight"], expected)


def test_transposed_convolutions_by_input_channel():
    layer, x = nn.ConvTranspose2d(2, 3, 3), torch.randn(5, 2, 4, 4)
    norms = x.transpose(0, 1).flatten(1).norm(dim=1).reshape(2, 1, 1, 1)
    torch.testing.assert_close(run(layer, x)["weight"], layer.weight.detach().abs() * norms)


def test_a_layer_used_twice_meets_both_inputs():
    layer, x = nn.Linear(3, 3), torch.randn(5, 3)
    y = layer(x).detach()
    model = nn.Sequential(layer, layer)
    expected = layer.weight.detach().abs() * torch.cat([x, y]).norm(dim=0)
    torch.testing.assert_close(run(model, x)["0.weight"], expected)


@pytest.mark.parametrize("separate", [False, True])
def test_attention_with_packed_and_separate_weights(separate):
    class Wrapped(nn.Module):
        def __init__(self):
            super().__init__()
            width = {"kdim": 5, "vdim": 6} if separate else {}
            self.attention = nn.MultiheadAttention(4, 2, batch_first=True, **width)

        def forward(self, x):
            return self.attention(x, key(x), value(x))[0]

    def key(x):
        return x[..., :1].repeat(1, 1, 5) if separate else x * 2

    def value(x):
        return x[..., :1].repeat(1, 1, 6) * 3 if separate else x * 3

    model, x = Wrapped(), torch.randn(5, 7, 4)
    scores = run(model, x)
    attention = model.attention

    def norm(t):
        return t.reshape(-1, t.shape[-1]).norm(dim=0)

    norms = [norm(x), norm(key(x)), norm(value(x))]
    if separate:
        weights = [attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight]
        got = [scores[f"attention.{n}_proj_weight"] for n in "qkv"]
    else:
        weights, got = attention.in_proj_weight.chunk(3), scores["attention.in_proj_weight"].chunk(3)
    for weight, n, values in zip(weights, norms, got, strict=True):
        torch.testing.assert_close(values, weight.detach().abs() * n)
    biases = attention.in_proj_bias.chunk(3)
    q, k, v = (
        F.linear(t, w, b).unflatten(-1, (2, 2)).transpose(1, 2)
        for t, w, b in zip((x, key(x), value(x)), weights, biases, strict=True)
    )
    mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2).detach()
    torch.testing.assert_close(
        scores["attention.out_proj.weight"], attention.out_proj.weight.detach().abs() * norm(mixed)
    )


def test_inside_torch_transformer_blocks():
    model = nn.TransformerEncoderLayer(4, 2, 8, batch_first=True, dropout=0.0)
    x = torch.randn(5, 3, 4)
    inputs = []
    hook = model.linear2.register_forward_pre_hook(lambda _, args: inputs.append(args[0].detach()))
    model.eval()(x)
    hook.remove()
    scores = run(model, x)
    norms = inputs[0].reshape(-1, 8).norm(dim=0)
    torch.testing.assert_close(scores["linear2.weight"], model.linear2.weight.detach().abs() * norms)
    assert torch.backends.mha.get_fastpath_enabled()


def test_the_transformers_conv1d_stores_inputs_first():
    class Conv1D(nn.Module):
        def __init__(self):
            super().__init__()
            self.nf = 3
            self.weight = nn.Parameter(torch.randn(4, 3))

        def forward(self, x):
            return x @ self.weight

    layer, x = Conv1D(), torch.randn(5, 4)
    torch.testing.assert_close(run(layer, x)["weight"], layer.weight.detach().abs() * x.norm(dim=0)[:, None])


def test_a_layer_under_torchs_own_pruning():
    layer, x = nn.Linear(4, 3), torch.randn(5, 4)
    torch_prune.l1_unstructured(layer, "weight", amount=0.5)
    torch.testing.assert_close(run(layer, x)["weight_orig"], layer.weight_orig.detach().abs() * x.norm(dim=0))


def test_a_weight_without_a_rule_is_named():
    with pytest.raises(ValueError, match="no input norm for 'weight_ih_l0'"):
        score(nn.RNN(3, 3), "wanda", batches=[(torch.randn(5, 2, 3), LABELS)], forward=lambda m, b: m(b[0])[0])
