"""Masks as objects: composing, files, torch's own pruning."""

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torch_prune

from shaver.pruning import Masks


def masks_of(model, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return Masks({n: torch.rand(p.shape, generator=generator) > 0.5 for n, p in model.named_parameters() if p.ndim > 1})


@pytest.fixture
def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 3, 3), nn.Flatten(), nn.Linear(12, 5))


def test_applying_zeroes_exactly_the_masked_weights(model):
    masks = masks_of(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    masks.apply_(model)
    for name, parameter in model.named_parameters():
        expected = before[name] * masks[name] if name in masks else before[name]
        assert torch.equal(parameter, expected)
    assert masks.sparsity == 1 - masks.kept / masks.total


def test_composition_keeps_what_both_keep(model):
    a, b = masks_of(model, 1), masks_of(model, 2)
    both = a & b
    assert all(torch.equal(both[n], a[n] & b[n]) for n in a)
    only = Masks({"0.weight": a["0.weight"]}) & Masks({"2.weight": b["2.weight"]})
    assert set(only) == {"0.weight", "2.weight"}
    with pytest.raises(ValueError, match="have shapes"):
        a & Masks({"0.weight": torch.ones(2, dtype=torch.bool)})


def test_files_restore_every_bit_with_one_bit_a_weight(model, tmp_path):
    large = Masks({"w": torch.rand(1000, 1001) > 0.5, "empty": torch.ones(0, 3, dtype=torch.bool)})
    for i, masks in enumerate([masks_of(model), large]):
        masks.save(tmp_path / f"{i}.safetensors")
        same = Masks.load(tmp_path / f"{i}.safetensors")
        assert list(same) == list(masks)
        assert all(torch.equal(same[n], masks[n]) for n in masks)
    assert (tmp_path / "1.safetensors").stat().st_size < 1000 * 1001 / 8 + 1000


def test_foreign_and_damaged_files_are_named(model, tmp_path):
    from shaver.io import save_state, save_tensors

    path = tmp_path / "m.safetensors"
    save_tensors(path, {"w": torch.ones(2)})
    with pytest.raises(ValueError, match="another program wrote it"):
        Masks.load(path)
    save_state(path, {"format": "other"})
    with pytest.raises(ValueError, match="does not hold masks"):
        Masks.load(path)
    save_state(path, {"format": "shaver.masks", "version": 9, "masks": {}})
    with pytest.raises(ValueError, match="version 9"):
        Masks.load(path)
    bits = torch.zeros(3, dtype=torch.uint8)
    save_state(path, {"format": "shaver.masks", "version": 1, "masks": {"w": {"shape": [4], "bits": bits}}})
    with pytest.raises(ValueError, match="does not fit its shape"):
        Masks.load(path)
    masks_of(model).save(path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(ValueError, match=r"m\.safetensors"):
        Masks.load(path)


def test_masks_of_another_model_change_nothing(model):
    masks = masks_of(model)
    before = {n: p.detach().clone() for n, p in model.named_parameters()}
    for wrong, message in [
        (Masks(dict(masks) | {"9.weight": masks["0.weight"]}), "does not have"),
        (Masks(dict(masks) | {"2.weight": torch.zeros(5, 11, dtype=torch.bool)}), "belong to another model"),
    ]:
        for act in (wrong.apply_, wrong.hold, wrong.to_torch_prune):
            with pytest.raises(ValueError, match=message):
                act(model)
    assert all(torch.equal(before[n], p) for n, p in model.named_parameters())
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_masks_are_boolean():
    with pytest.raises(TypeError, match=r"torch\.float32"):
        Masks({"w": torch.ones(2)})


def test_to_torch_prune_and_back(model):
    masks = masks_of(model)
    x = torch.randn(2, 1, 4, 4)
    masks.to_torch_prune(model)
    assert torch_prune.is_pruned(model)
    assert isinstance(model[0].weight_orig, nn.Parameter)
    pruned_output = model(x)
    same = Masks.from_torch_prune(model)
    assert set(same) == set(masks)
    assert all(torch.equal(same[n], masks[n]) for n in masks)
    same.apply_(model)  # onto weight_orig
    assert torch.equal(model[2].weight_orig == 0, ~masks["2.weight"])
    for layer in (model[0], model[2]):
        torch_prune.remove(layer, "weight")
    torch.testing.assert_close(model(x), pruned_output)


def test_from_what_torch_prune_did(model):
    torch_prune.l1_unstructured(model[2], "weight", amount=0.5)
    torch_prune.random_unstructured(model[2], "weight", amount=0.5)
    torch_prune.l1_unstructured(model[2], "bias", amount=2)
    masks = Masks.from_torch_prune(model)
    assert torch.equal(masks["2.weight"], model[2].weight_mask.bool())
    assert masks["2.bias"].sum() == 3
    with pytest.raises(ValueError, match="holds no masks"):
        Masks.from_torch_prune(nn.Linear(2, 2))
