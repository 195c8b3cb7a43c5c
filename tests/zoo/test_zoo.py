"""The networks have the published sizes, can be rebuilt, and name what is wrong with their input."""

import json

import pytest
import torch
from torch import nn

from shaver import zoo
from shaver.zoo.fixup import FixupBlock

# Small enough to run each in milliseconds, with the shape of one sample.
SMALL = {
    "fcn": ({"inputs": 12, "hidden": [7, 5], "classes": 3}, (3, 4)),
    "lenet": ({"image_size": 32, "channels": 3, "classes": 3}, (3, 32, 32)),
    "lenet_caffe": ({"classes": 3, "widths": [2, 3, 4]}, (1, 28, 28)),
    "digits_cnn": ({"classes": 3}, (1, 8, 8)),
    "mixer": ({"image_size": 8, "patch_size": 2, "dim": 6, "token_dim": 5, "channel_dim": 7, "classes": 3}, (1, 8, 8)),
    "resnet18_fixup": ({"planes": 4, "classes": 3}, (3, 16, 16)),
    "resnet18": ({"planes": 4, "classes": 3}, (3, 16, 16)),
    "wrn16_fixup": ({"widen": 1, "classes": 3}, (3, 8, 8)),
    "wrn16": ({"widen": 1, "classes": 3}, (3, 8, 8)),
    "vit": ({"image_size": 8, "patch_size": 4, "dim": 8, "heads": 2, "mlp_dim": 9, "classes": 3}, (1, 8, 8)),
}


def size(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def test_every_network_has_a_small_case():
    assert sorted(SMALL) == sorted(zoo.names())


@pytest.mark.parametrize(
    ("name", "arguments", "count"),
    [
        ("fcn", {"inputs": 30, "hidden": (100, 100), "classes": 2}, 13_402),
        ("fcn", {}, 203_530),
        ("lenet", {}, 60_170),
        ("lenet", {"image_size": 32, "channels": 3}, 62_006),
        ("fcn", {"hidden": (300, 100)}, 266_610),  # LeNet-300-100
        ("lenet_caffe", {}, 431_080),
        ("digits_cnn", {}, 22_954),
        ("resnet18_fixup", {"planes": 64}, 10_992_372),
        ("resnet18", {}, 11_173_962),
        ("wrn16_fixup", {}, 2_745_306),
        ("wrn16_fixup", {"classes": 100}, 2_768_436),
        ("wrn16", {}, 2_748_890),
        ("vit", {}, 275_210),
    ],
)
def test_parameter_counts_are_the_published_ones(name, arguments, count):
    assert size(zoo.build(name, **arguments)) == count


@pytest.mark.parametrize("name", ["fcn", "lenet_caffe"])
def test_dropout_changes_training_only_and_is_rebuilt(name):
    arguments, shape = SMALL[name]
    plain, dropping = (zoo.build(name, seed=1, dropout=share, **arguments) for share in (0.0, 0.5))
    x = torch.rand(4, *shape) + 1
    assert torch.equal(plain.eval()(x), dropping.eval()(x))
    dropping.train()
    assert not torch.equal(dropping(x), dropping(x))
    assert "dropout" not in plain.arguments
    assert zoo.build(**json.loads(json.dumps(dropping.arguments))).dropout.p == 0.5
    for wrong in (1.0, -0.1, True, "a"):
        with pytest.raises(ValueError, match="share of the inputs to drop"):
            zoo.build(name, dropout=wrong, **arguments)


@pytest.mark.parametrize("name", SMALL)
def test_a_network_is_rebuilt_from_its_plain_arguments(name):
    arguments, shape = SMALL[name]
    model = zoo.build(name, seed=1, **arguments)
    plain = json.loads(json.dumps(zoo.arguments_of(model)))
    assert plain["name"] == name
    assert {key: plain[key] for key in arguments} == arguments
    twin = zoo.build(**plain, seed=2)
    twin.load_state_dict(model.state_dict())
    x = torch.randn(2, *shape)
    torch.testing.assert_close(twin.eval()(x), model.eval()(x), rtol=0, atol=0)


@pytest.mark.parametrize("name", SMALL)
def test_a_seed_fixes_the_weights_and_leaves_the_global_random_state_alone(name):
    arguments, _ = SMALL[name]
    before = torch.get_rng_state()
    one, two, other = (zoo.build(name, seed=seed, **arguments).state_dict() for seed in (3, 3, 4))
    assert torch.equal(before, torch.get_rng_state())
    assert all(torch.equal(one[key], two[key]) for key in one)
    assert any(not torch.equal(one[key], other[key]) for key in one)


@pytest.mark.parametrize("name", SMALL)
def test_every_parameter_of_every_network_takes_part(name):
    arguments, shape = SMALL[name]
    model = zoo.build(name, seed=0, **arguments).double()
    with torch.no_grad():  # a Fixup head at zero would hide everything below it
        for p in model.parameters():
            p.add_(torch.randn(p.shape, dtype=p.dtype, generator=torch.Generator().manual_seed(0)) * 0.1)
    out = model(torch.randn(5, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1)))
    assert out.shape == (5, 3)
    nn.functional.cross_entropy(out, torch.tensor([0, 1, 2, 0, 1])).backward()
    unused = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert unused == []


@pytest.mark.parametrize("name", SMALL)
def test_a_wrong_shape_is_answered_with_the_expected_and_the_given_one(name):
    arguments, shape = SMALL[name]
    model = zoo.build(name, **arguments)
    with pytest.raises(ValueError, match=r"expected .*\(batch, .*\(2, 5, 9, 9\)"):
        model(torch.zeros(2, 5, 9, 9))
    with pytest.raises(ValueError, match="expected"):
        model(torch.zeros(shape[-1]))


def test_images_without_a_channel_dimension_get_the_cure():
    with pytest.raises(ValueError, match=r"unsqueeze\(1\)"):
        zoo.build("lenet")(torch.zeros(2, 28, 28))


def test_unknown_names_and_options_list_the_valid_ones():
    with pytest.raises(ValueError, match=r"unknown network 'lennet'; did you mean 'lenet'\? Valid: 'fcn', 'lenet'"):
        zoo.build("lennet")
    with pytest.raises(ValueError, match=r"unknown option of 'fcn' 'hiden'; did you mean 'hidden'\?.*'inputs'"):
        zoo.build("fcn", hiden=(3,))


@pytest.mark.parametrize(
    ("name", "arguments", "message"),
    [
        ("fcn", {"hidden": (5, 0)}, r"hidden\[1\] must be a positive integer, not 0"),
        ("lenet", {"image_size": 30}, "28 or 32 pixels, not image_size=30"),
        ("lenet", {"classes": "10"}, "classes must be a positive integer, not '10'"),
        ("lenet_caffe", {"widths": (20, 50)}, r"one hidden layer, not widths=\(20, 50\)"),
        ("vit", {"patch_size": 5}, "patch_size=5 does not divide image_size=28; use one of 1, 2, 4, 7, 14, 28"),
        ("vit", {"heads": 3}, "heads=3 does not divide dim=128"),
        ("wrn16", {"depth": 17}, r"6n \+ 4 layers .* not depth=17"),
    ],
)
def test_impossible_options_are_named(name, arguments, message):
    with pytest.raises(ValueError, match=message):
        zoo.build(name, **arguments)


def test_a_foreign_network_has_no_arguments():
    with pytest.raises(TypeError, match=r"Linear is not a network of shaver\.zoo"):
        zoo.arguments_of(nn.Linear(2, 2))


def test_changing_the_returned_arguments_does_not_change_the_network():
    model = zoo.build("fcn", hidden=[4])
    zoo.arguments_of(model)["hidden"].append(9)
    assert zoo.arguments_of(model)["hidden"] == [4]


def test_the_mixer_mixes_tokens():
    model = zoo.build("mixer", seed=0)
    seen = {}
    model.blocks.register_forward_hook(lambda module, inputs, output: seen.update(out=output))
    x = torch.randn(1, 1, 28, 28)
    model(x)
    before = seen["out"]
    x[..., :7, :7] += 1  # the first patch alone
    model(x)
    moved = (seen["out"] - before).abs().amax((0, 2))
    assert (moved > 0).all()


def test_attention_equals_the_textbook_formula():
    attention = zoo.build("vit", seed=0).blocks[0].attention.double()
    x = torch.randn(2, 5, 128, dtype=torch.float64)
    q, k, v = (part.reshape(2, 5, 4, 32).transpose(1, 2) for part in attention.qkv(x).chunk(3, -1))
    weights = (q @ k.transpose(-1, -2) / 32**0.5).softmax(-1)
    expected = attention.out((weights @ v).transpose(1, 2).reshape(2, 5, 128))
    torch.testing.assert_close(attention(x), expected)


class TestFixup:
    def test_every_block_starts_as_its_shortcut(self):
        model = zoo.build("resnet18_fixup", seed=0, planes=4)
        x = torch.rand(2, 4, 8, 8)
        narrowing = model.blocks[2](x)
        torch.testing.assert_close(model.blocks[0](x), x)
        torch.testing.assert_close(narrowing[:, :4], x[..., ::2, ::2])
        assert not narrowing[:, 4:].any()

    def test_the_first_convolution_of_a_branch_shrinks_with_the_number_of_branches(self):
        model = zoo.build("resnet18_fixup", seed=0, planes=32)
        blocks = [m for m in model.modules() if isinstance(m, FixupBlock)]
        assert len(blocks) == 8
        for block in blocks:
            expected = (2 / (block.conv1.out_channels * 9)) ** 0.5 * 8**-0.5
            assert block.conv1.weight.std().item() == pytest.approx(expected, rel=0.05)
            assert not block.conv2.weight.any()
        assert not model.head.weight.any()

    def test_scalars_are_five_a_block_and_two_outside(self):
        model = zoo.build("wrn16_fixup", widen=1)
        scalars = [m for m in model.modules() if isinstance(m, zoo.Bias | zoo.Scale)]
        assert len(scalars) == 5 * 6 + 2
        assert all(p.shape == (1,) for m in scalars for p in m.parameters())

    def test_a_bias_adds_and_a_scale_multiplies(self):
        bias, scale = zoo.Bias(), zoo.Scale()
        x = torch.randn(3)
        assert torch.equal(bias(x), x)
        assert torch.equal(scale(x), x)
        with torch.no_grad():
            bias.bias.fill_(2)
            scale.scale.fill_(3)
        assert torch.equal(bias(x), x + 2)
        assert torch.equal(scale(x), x * 3)


def test_a_saved_reader_is_rebuilt_and_nothing_else_of_the_library():
    """The name of its model comes from a file, so it must not reach every attribute of transformers."""
    transformers = pytest.importorskip("transformers")
    config = transformers.DistilBertConfig(vocab_size=30, dim=16, n_layers=1, n_heads=2, hidden_dim=8, pad_token_id=0)
    reader = zoo.Reader(transformers.DistilBertForSequenceClassification(config))
    arguments = zoo.arguments_of(reader)
    again = zoo.rebuild(arguments)
    assert {n: p.shape for n, p in again.named_parameters()} == {n: p.shape for n, p in reader.named_parameters()}
    for name in ("AutoTokenizer", "Trainer", "pipeline", "__doc__", "DistilBertModel", 3):
        with pytest.raises(ValueError, match="is not a sequence classifier or causal model"):
            zoo.rebuild(arguments | {"model": name})
    with pytest.raises(ValueError, match="is not a sequence classifier"):
        zoo.rebuild(arguments | {"config": {"model_type": ["bert"]}})
    for wrong, message in [
        ({"name": "reader", "weights": "x"}, "cannot be built with these options"),
        ({"name": ["lenet"]}, "does not name a network"),
        (7, "does not name a network"),
        ({"name": "os"}, "unknown network 'os'"),
    ]:
        with pytest.raises(ValueError, match=message):
            zoo.rebuild(wrong)
