"""A compact network computes what the masked one does, whatever couples its units; else nothing happens."""

from copy import deepcopy

import pytest
import torch
from torch import nn

from shaver.structure import (
    CompactionError,
    Group,
    Groups,
    Slice,
    find_groups,
    mask_units,
    register_surgery,
    removal_record,
    remove_units,
)
from shaver.structure.removal import TOLERANCES
from tests.structure.compact_cases import CASES, Encoder, case, copy_of, draw, numbers, other, outputs, shaken


def count(model):
    return sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("name", CASES)
def test_compact_equals_masked_to_twelve_digits(name):
    model, groups, example = case(name)
    before = deepcopy(model.state_dict())
    for seed in (1, 2):
        kept = draw(groups, seed)
        masked = copy_of(mask_units(model, groups, kept), model)
        small = remove_units(model, groups, kept, example).model
        for inputs in (example, other(example)):
            expected, dense = outputs(masked, inputs), outputs(model, inputs)
            size = expected.abs().max()
            assert (outputs(small, inputs) - expected).abs().max() <= 1e-12 * size
            assert (dense - expected).abs().max() > 1e-3 * size  # masking did something
        assert count(small) < count(model)
        assert not small.training
    for tensor, value in model.state_dict().items():
        assert torch.equal(value, before[tensor])
    assert removal_record(model) is None


@pytest.mark.parametrize("name", ["lenet", "resnet18", "mixer", "vit", "transformers bert"])
def test_in_float32_too(name):
    model, groups, example = case(name)
    example = {k: v.float() if v.is_floating_point() else v for k, v in example.items()} if isinstance(
        example, dict
    ) else example.float()  # fmt: skip
    found = remove_units(model.float(), groups, draw(groups, 3), example)
    assert found.difference <= 1e-6
    assert outputs(found.model, example).dtype == torch.float32


@pytest.mark.parametrize("name", ["resnet18", "transformers llama", "MultiheadAttention"])
def test_compaction_can_be_repeated(name):
    model, groups, example = case(name)
    once = remove_units(model, groups, draw(groups, 1, 0.8), example).model
    again = find_groups(once, example)
    kept = draw(again, 2, 0.7)
    masked = copy_of(mask_units(once, again, kept), once)
    twice = remove_units(once, again, kept, example, in_place=True).model
    assert twice is once
    expected = outputs(masked, other(example))
    assert (outputs(twice, other(example)) - expected).abs().max() <= 1e-12 * expected.abs().max()
    total = removal_record(twice)
    originals = dict(model.named_parameters())
    for tensor, dims in total.kept.items():
        if tensor in originals:
            stayed = originals[tensor]
            for dim, positions in dims.items():
                stayed = stayed.index_select(dim, positions)
            assert torch.equal(stayed, twice.get_parameter(tensor)), tensor  # positions count in the original network


def test_attributes_say_the_new_widths():
    model, groups, example = case("resnet18")
    kept = draw(groups, 4)
    small = remove_units(model, groups, kept, example).model
    for name, keep in kept.items():
        conv = small.get_submodule(name)
        assert conv.out_channels == len(conv.weight) == int(keep.sum())
        assert small.get_submodule(name.replace("conv1", "norm1")).num_features == int(keep.sum())
        assert small.get_submodule(name.replace("conv1", "conv2")).in_channels == int(keep.sum())
    model, groups, example = case("depthwise")
    kept = {name: torch.arange(group.units) < 3 for name, group in groups.items()}
    small = remove_units(model, groups, kept, example).model
    assert (small[2].groups, small[2].in_channels, small[2].out_channels) == (3, 3, 3)
    model, groups, example = case("transformers gpt2")
    kept = {name: torch.arange(group.units) > 0 for name, group in groups.items()}
    small = remove_units(model, groups, kept, example).model
    attention, mlp = small.transformer.h[0].attn, small.transformer.h[0].mlp
    assert (attention.num_heads, attention.split_size, attention.head_dim) == (2, 16, 8)
    assert (attention.c_attn.nx, attention.c_attn.nf, attention.c_proj.nx, mlp.c_fc.nf) == (24, 48, 16, 95)
    assert small.lm_head.weight is small.transformer.wte.weight  # tied as before
    model, groups, example = case("transformers bert")
    kept = {name: torch.arange(group.units) > 0 for name, group in groups.items()}
    attention = remove_units(model, groups, kept, example).model.bert.encoder.layer[0].attention.self
    assert (attention.num_attention_heads, attention.all_head_size) == (2, 16)
    model, groups, example = case("transformers llama")
    kept = {name: torch.arange(group.units) > 0 for name, group in groups.items()}
    layer = remove_units(model, groups, kept, example).model.model.layers[0]
    assert (layer.self_attn.q_proj.out_features, layer.self_attn.num_key_value_groups) == (16, 2)
    assert layer.mlp.intermediate_size == layer.mlp.up_proj.out_features == 19


def slim(**options):
    """MultiheadAttention without its heads 0 and 2, and the whole one with those heads masked."""
    torch.manual_seed(0)
    whole = shaken(nn.MultiheadAttention(12, 4, **options))
    model = nn.ModuleDict({"attention": whole})
    rows = torch.arange(36).reshape(3, 4, 3).transpose(0, 1).reshape(4, 9)
    one = torch.arange(12).reshape(4, 3)
    makes = (
        ["in_proj_weight"] if whole.in_proj_weight is not None else ["q_proj_weight", "k_proj_weight", "v_proj_weight"]
    )
    slices = [Slice(f"attention.{m}", 0, rows if len(makes) == 1 else one, "makes") for m in makes]
    slices += [Slice("attention.in_proj_bias", 0, rows, "makes"), Slice("attention.out_proj.weight", 1, one, "reads")]
    groups = Groups({"attention": Group("attention", "heads", 4, tuple(slices))})
    kept = {"attention": torch.tensor([False, True, False, True])}
    sizes = (whole.kdim, whole.vdim)
    example = (numbers(3, 5, 12), numbers(3, 6, sizes[0], seed=2), numbers(3, 6, sizes[1], seed=3))
    if not options.get("batch_first"):
        example = tuple(x.transpose(0, 1) for x in example)

    def forward(model, example):
        return model["attention"](*example)[0]

    small = remove_units(model, groups, kept, example, forward=forward).model["attention"]
    return small, copy_of(mask_units(model, groups, kept), model)["attention"], example


@pytest.mark.parametrize("options", [{"batch_first": True}, {"batch_first": True, "kdim": 7, "vdim": 5}, {}])
def test_slim_attention_takes_masks_and_gives_weights_as_pytorchs_does(options):
    small, masked, (q, k, v) = slim(**options)
    assert small.num_heads == 2
    causal = torch.ones(5, 6, dtype=torch.bool).triu(2)
    padding = torch.zeros(3, 6, dtype=torch.bool)
    padding[1, 4:] = True
    floating = numbers(5, 6, seed=9)
    for given in (
        {},
        {"attn_mask": causal},
        {"attn_mask": floating, "key_padding_mask": torch.zeros(3, 6).double().masked_fill(padding, -torch.inf)},
        {"attn_mask": causal, "key_padding_mask": padding},
        {"key_padding_mask": padding, "need_weights": False},
    ):
        expected, weights = masked(
            q, k, v, **given, **({} if "need_weights" in given else {"average_attn_weights": False})
        )
        found, own = small(q, k, v, **given, **({} if "need_weights" in given else {"average_attn_weights": False}))
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
        if weights is not None:
            torch.testing.assert_close(own, weights[:, [1, 3]], rtol=0, atol=1e-12)  # of the heads that are left
    single = [x[0] if options.get("batch_first") else x[:, 0] for x in (q, k, v)]
    torch.testing.assert_close(small(*single)[0], masked(*single)[0], rtol=0, atol=1e-12)


def test_the_encoder_is_compact_in_training_mode_too():
    torch.manual_seed(0)
    model, example = shaken(Encoder(dropout=0.0)), numbers(4, 5, 24)
    groups = find_groups(model, example)
    kept = draw(groups, 1)
    masked = copy_of(mask_units(model, groups, kept), model).train()
    small = remove_units(model.train(), groups, kept, example).model
    assert small.training
    torch.testing.assert_close(small(example), masked(example), rtol=0, atol=1e-12)


def test_wrong_groups_are_refused_by_name_and_nothing_is_changed():
    model, groups, example = case("lenet")
    conv = groups["conv2"]
    broken = Groups({**groups, "conv2": Group("conv2", "channels", conv.units, conv.slices[:-1])})
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    before = deepcopy(model.state_dict())
    with pytest.raises(CompactionError, match="group 'conv2' alone fails at 'conv3'"):
        remove_units(model, broken, draw(groups, 1), example, in_place=True, optimizer=optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert model.conv2.out_channels == 16
    assert removal_record(model) is None


def test_a_layer_norm_over_removed_channels_is_not_exact_and_says_so():
    model = shaken(nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3)))
    one = torch.arange(8).unsqueeze(1)
    slices = [Slice(t, 0, one, "makes") for t in ("0.weight", "0.bias", "1.weight", "1.bias")]
    groups = Groups({"0": Group("0", "hidden", 8, (*slices, Slice("2.weight", 1, one, "reads")))})
    kept = {"0": torch.arange(8) > 2}
    with pytest.raises(CompactionError, match=r"outputs differ by .* group '0' alone"):
        remove_units(model, groups, kept, numbers(4, 5))
    loose = remove_units(model, groups, kept, numbers(4, 5), tolerance=10.0)
    assert loose.difference > 1e-3
    assert loose.model[1].normalized_shape == (5,)


class Twice(nn.Module):
    """Two layers that are one: the same weight under two names."""

    def __init__(self):
        super().__init__()
        self.first, self.a, self.b = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 3)
        self.b.weight = self.a.weight

    def forward(self, x):
        hidden = self.first(x).relu()
        return self.a(hidden) + self.b(hidden.square())


def test_a_tied_weight_is_sliced_once_and_stays_tied():
    model = shaken(Twice())
    one = torch.arange(8).unsqueeze(1)
    slices = [Slice(f"first.{n}", 0, one, "makes") for n in ("weight", "bias")] + [Slice("a.weight", 1, one, "reads")]
    groups = Groups({"first": Group("first", "hidden", 8, tuple(slices))})
    found = remove_units(model, groups, {"first": torch.arange(8) > 2}, numbers(4, 5))
    small = found.model
    assert small.a.weight is small.b.weight
    assert (small.a.in_features, small.b.in_features) == (5, 5)
    assert set(found.record.kept) == {"first.weight", "first.bias", "a.weight", "b.weight"}


def test_what_cannot_be_asked_for():
    model, groups, example = case("fcn")
    with pytest.raises(ValueError, match="FCN does not run on the example: expected samples of 784 numbers"):
        remove_units(model, groups, draw(groups, 1), example[:, :7])
    name, group = next(iter(groups.items()))
    with pytest.raises(ValueError, match=f"kept\\['{name}'\\] keeps none of {group.units} units"):
        remove_units(model, groups, {name: torch.zeros(group.units, dtype=torch.bool)}, example)
    with pytest.raises(ValueError, match="in_place=True"):
        remove_units(model, groups, {}, example, optimizer=torch.optim.SGD(model.parameters(), 0.1))
    same = remove_units(model, groups, {name: torch.ones(group.units, dtype=torch.bool)}, example)
    assert same.difference == 0
    assert not same.record.kept


class Doubled(nn.Module):
    """Keeps its width in an attribute of its own, and cannot work with a wrong one."""

    def __init__(self, width):
        super().__init__()
        self.width, self.scale = width, nn.Parameter(torch.ones(width))

    def forward(self, x):
        return x.view(-1, self.width) * self.scale * 2


def test_a_users_own_module_type_is_three_lines():
    model = shaken(nn.Sequential(nn.Linear(5, 8), Doubled(8), nn.Linear(8, 3)))
    one = torch.arange(8).unsqueeze(1)
    slices = [Slice(t, 0, one, "makes") for t in ("0.weight", "0.bias", "1.scale")]
    groups = Groups({"0": Group("0", "hidden", 8, (*slices, Slice("2.weight", 1, one, "reads")))})
    kept = {"0": torch.arange(8) > 2}
    with pytest.raises(CompactionError, match="fails at '1'"):
        remove_units(model, groups, kept, numbers(4, 5))

    @register_surgery(Doubled)
    def _(module, kept):
        assert kept["scale"][0].tolist() == [3, 4, 5, 6, 7]
        module.width = len(module.scale)

    assert remove_units(model, groups, kept, numbers(4, 5)).difference <= 1e-12


def test_uneven_groups_of_a_convolution_are_named():
    model = shaken(nn.Sequential(nn.Conv2d(4, 8, 1), nn.Conv2d(8, 8, 1, groups=2), nn.Conv2d(8, 2, 1)))
    one = torch.arange(8).unsqueeze(1)
    slices = [Slice("1.weight", 0, one, "makes"), Slice("1.bias", 0, one, "makes"), Slice("2.weight", 1, one, "reads")]
    groups = Groups({"1": Group("1", "channels", 8, tuple(slices))})
    with pytest.raises(CompactionError, match=r"would keep \[3, 4\] channels"):
        remove_units(model, groups, {"1": torch.arange(8) > 0}, numbers(2, 4, 3, 3))
    even = torch.tensor([False, True, True, True, True, False, True, True])
    assert remove_units(model, groups, {"1": even}, numbers(2, 4, 3, 3)).model[1].groups == 2


def test_where_rounding_alone_exceeds_the_tolerance_float64_decides(monkeypatch):
    model, groups, example = case("lenet")
    model, example, kept = model.float(), example.float(), draw(groups, 1)
    monkeypatch.setitem(TOLERANCES, torch.float32, 0.0)
    assert 0 < remove_units(model, groups, kept, example).difference < 1e-5
    with torch.backends.mkldnn.flags(enabled=False):  # whose bfloat16 is not there on every processor
        half = remove_units(model.bfloat16(), groups, kept, example.bfloat16()).model
    assert half.conv1.weight.dtype == torch.bfloat16
    normed = shaken(nn.Sequential(nn.Linear(5, 8), nn.LayerNorm(8), nn.Linear(8, 3))).float()
    one = torch.arange(8).unsqueeze(1)
    slices = [Slice(t, 0, one, "makes") for t in ("0.weight", "0.bias", "1.weight", "1.bias")]
    groups = Groups({"0": Group("0", "hidden", 8, (*slices, Slice("2.weight", 1, one, "reads")))})
    with pytest.raises(CompactionError, match="outputs differ"):
        remove_units(normed, groups, {"0": torch.arange(8) > 2}, numbers(4, 5).float())


@pytest.mark.parametrize("name", ["resnet18", "wrn16_fixup"])
def test_residual_streams_where_they_were_asked_for(name):
    model, _, example = case(name)
    groups = find_groups(model, example, residual=True)
    assert "residual" in {group.kind for group in groups.values()}
    kept = draw(groups, 1)
    masked = copy_of(mask_units(model, groups, kept), model)
    small = remove_units(model, groups, kept, example).model
    expected = outputs(masked, other(example))
    assert (outputs(small, other(example)) - expected).abs().max() <= 1e-12 * expected.abs().max()


def test_padded_tokens_of_the_encoder_are_left_out_as_before():
    torch.manual_seed(0)
    model, x = shaken(Encoder(dropout=0.0)), numbers(4, 5, 24)
    groups = find_groups(model, x)
    kept = draw(groups, 1)
    masked = copy_of(mask_units(model, groups, kept), model)
    small = remove_units(model, groups, kept, x).model
    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[2, 3:] = True
    with torch.no_grad():
        found, expected = (m.body(x, src_key_padding_mask=padding)[~padding] for m in (small, masked))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
