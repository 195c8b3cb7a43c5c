"""Compact networks on disk: rebuilt from their own constructor, exactly or not at all."""

import json
from copy import deepcopy

import pytest
import torch
from torch import nn

import shaver
from shaver.files import load_masks
from shaver.pruning import prune
from shaver.structure import find_groups, removal_record, remove_units
from tests.structure.compact_cases import Encoder, case, draw, numbers, outputs, shaken


def compacted(name, seed=1):
    model, groups, example = case(name)
    return remove_units(model, groups, draw(groups, seed), example).model, example


def assert_same(a, b, example):
    assert {n: t.shape for n, t in a.state_dict().items()} == {n: t.shape for n, t in b.state_dict().items()}
    assert all(torch.equal(t, b.state_dict()[n]) for n, t in a.state_dict().items())
    torch.testing.assert_close(outputs(a.eval(), example), outputs(b.eval(), example))


@pytest.mark.parametrize("name", ["lenet", "resnet18", "vit", "mixer", "wrn16_fixup"])
def test_networks_of_the_zoo_need_no_factory(tmp_path, name):
    small, example = compacted(name)
    shaver.save(small, tmp_path)
    dense = shaver.zoo.build(**small.arguments)
    restored = shaver.load(tmp_path)
    assert type(restored) is type(dense)
    assert_same(restored, small, example)
    shaver.save(restored.float(), tmp_path / "again")  # what was loaded carries its plan on
    assert_same(shaver.load(tmp_path / "again"), small.float(), example.float())


def test_a_users_own_network_and_one_that_contains_it(tmp_path):
    model, example = shaken(Encoder()), numbers(4, 5, 24)
    groups = find_groups(model, example)
    small = remove_units(model, groups, draw(groups, 1), example).model
    shaver.save(deepcopy(small), tmp_path / "own")
    assert_same(shaver.load(tmp_path / "own", lambda: Encoder().double()), small, example)

    class Wrapped(nn.Module):
        def __init__(self, body):
            super().__init__()
            self.body, self.scale = body, nn.Parameter(torch.ones(3, dtype=torch.float64))

        def forward(self, x):
            return self.body(x) * self.scale

    whole = Wrapped(small)
    shaver.save(whole, tmp_path / "wrapped")
    assert_same(shaver.load(tmp_path / "wrapped", lambda: Wrapped(Encoder().double())), whole, example)
    as_small = deepcopy(small)
    with torch.no_grad():
        as_small.head.weight.zero_()
    assert shaver.load(tmp_path / "own", as_small) is as_small  # a network that is as small already
    assert_same(as_small, small, example)


def test_several_compactions_a_folded_bias_and_masks_in_one_folder(tmp_path):
    def build():
        return nn.Sequential(
            nn.Linear(5, 8), nn.Sigmoid(), nn.Linear(8, 6, bias=False), nn.ReLU(), nn.Linear(6, 3)
        ).double()

    model, example = shaken(build()), numbers(6, 5)
    with torch.no_grad():
        model[0].weight[:3] = 0
    groups = find_groups(shaken(build()), example)
    small = remove_units(model, groups, {"0": torch.arange(8) > 2}, example, mask=False).model
    again = find_groups(small, example)
    remove_units(small, again, {n: torch.arange(g.units) != 1 for n, g in again.items()}, example, in_place=True)
    masks = prune(small, shaver.score(small, "magnitude"), 0.5).masks
    shaver.save(small, tmp_path, masks)
    restored = shaver.load(tmp_path, build)
    assert_same(restored, small, example)
    assert removal_record(restored).biases == ("2.bias",)
    stored = load_masks(tmp_path)
    assert all(torch.equal(stored[name], mask) for name, mask in masks.items())
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["version"] == 2
    assert plan["removed"]["tensors"]["0.weight"] == {"shape": [8, 5], "kept": {"0": "3,5-7"}}


def test_a_network_that_is_only_masked_is_still_version_one(tmp_path):
    model = shaver.zoo.build("fcn", seed=0)
    prune(model, shaver.score(model, "magnitude"), 0.9)
    shaver.save(model, tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["version"] == 1
    assert "removed" not in plan


def test_wrong_factories_and_damaged_plans_leave_the_network_as_it_was(tmp_path):
    small, _ = compacted("lenet")
    shaver.save(small.float(), tmp_path)
    file = tmp_path / "plan.json"
    plan = json.loads(file.read_text())

    def refused(message, network=None):
        network = network or shaver.zoo.build("lenet", seed=0)
        before = deepcopy(network.state_dict())
        with pytest.raises(ValueError, match=message):
            shaver.load(tmp_path, network)
        assert all(torch.equal(t, before[n]) for n, t in network.state_dict().items())
        assert removal_record(network) is None

    refused(r"removes part of 'conv1.weight', which FCN does not have", shaver.zoo.build("fcn"))
    refused(
        r"'conv1.weight' of shape \(6, 1, 5, 5\); in LeNet it has shape \(6, 3, 5, 5\)",
        shaver.zoo.build("lenet", channels=3),
    )
    larger = shaver.zoo.build("lenet")
    larger.extra = nn.Linear(2, 2)
    refused("'extra.weight' is missing in the file", larger)
    tensors = plan["removed"]["tensors"]
    conv = tensors["conv1.weight"]
    for entry, message in [
        (conv | {"kept": {"0": "0-9"}}, "damaged at 'conv1.weight', dimension 0"),
        (conv | {"kept": {"9": "0"}}, "damaged at 'conv1.weight', dimension 9"),
        (conv | {"kept": {"0": "2,1"}}, "do not ascend"),
        (conv | {"kept": {"0": "a-b"}}, "is damaged"),
        ({"shape": [6]}, "is damaged"),
        (conv | {"kept": {"0": "0"}}, "'conv1.weight' is .* in the file and 1x1x5x5"),
    ]:
        file.write_text(json.dumps(plan | {"removed": {"tensors": tensors | {"conv1.weight": entry}, "biases": []}}))
        refused(message)
    file.write_text(json.dumps(plan | {"removed": {"tensors": tensors, "biases": ["conv1.bias"]}}))
    refused("adds 'conv1.bias', which does not fit LeNet")
    file.write_text(json.dumps(plan | {"version": 3}))
    refused("has version 3 .* a newer shaver wrote it")
    without = {name: entry for name, entry in plan["tensors"].items() if name != "fc2.bias"}
    file.write_text(json.dumps(plan | {"tensors": without}))
    refused("'fc2.bias' is missing in the file")


@pytest.mark.parametrize("name", ["llama", "bert"])
def test_a_transformers_model_of_uniform_widths_keeps_a_config_that_loads(tmp_path, name):
    model, groups, example = case(f"transformers {name}")
    config, before = model.config, model.config.to_dict()
    inner = {n: g for n, g in groups.items() if "pooler" not in n and (name == "llama" or g.kind == "hidden")}
    kept = {n: torch.arange(g.units) < (g.units + 1) // 2 for n, g in inner.items()}
    small = remove_units(model, groups, kept, example).model
    assert small.config.intermediate_size == 10
    assert small.config.num_attention_heads == (2 if name == "llama" else 3)
    assert model.config is config
    assert config.to_dict() == before  # the caller's own object
    small.save_pretrained(tmp_path / "hub")
    restored = type(small).from_pretrained(tmp_path / "hub", dtype=torch.float64)
    assert_same(restored, small, example)
    shaver.save(small, tmp_path / "own")
    from_original = shaver.load(tmp_path / "own", lambda: type(model)(config).double())
    assert_same(from_original, small, example)
    assert from_original.config.intermediate_size == 10
    assert_same(shaver.load(tmp_path / "own", lambda: type(model)(small.config).double()), small, example)


def test_a_transformers_model_of_other_widths_is_loaded_by_shaver(tmp_path):
    model, groups, example = case("transformers bert")
    small = remove_units(model, groups, draw(groups, 5), example).model
    assert small.config.intermediate_size == model.config.intermediate_size  # no configuration says these widths
    shaver.save(small, tmp_path)
    assert_same(shaver.load(tmp_path, lambda: type(model)(model.config).double()), small, example)
