"""Files of pruned networks: small, exact, and never half there."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import shaver
from shaver.criteria import score
from shaver.files import load, load_masks, save, saved
from shaver.files.encoding import decode, encode
from shaver.io import load_state, save_tensors
from shaver.pruning import prune


def lenet():
    """60,170 parameters."""
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(6, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 120, 5), nn.Flatten(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


class Mixed(nn.Module):
    """Norm statistics, an integer buffer, a tied weight, half precision."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.first = nn.Linear(40, 40)
        self.tied = nn.Linear(40, 40)
        self.tied.weight = self.first.weight
        self.narrow = nn.Linear(40, 40).bfloat16()
        self.register_buffer("nothing", torch.zeros(0))
        self.register_buffer("scalar", torch.tensor(3.5, dtype=torch.float64))


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor


def assert_same(a, b):
    assert list(a.state_dict()) == list(b.state_dict())
    for name, tensor in a.state_dict().items():
        other = b.state_dict()[name]
        assert tensor.dtype == other.dtype
        assert tensor.shape == other.shape
        assert torch.equal(bits(tensor), bits(other)), name


def size(folder):
    return sum(file.stat().st_size for file in folder.iterdir())


@pytest.mark.parametrize(("sparsity", "ratio"), [(0.95, 8), (0.99, 25)])
@pytest.mark.parametrize("criterion", ["magnitude", "random"])
def test_a_pruned_lenet_is_many_times_smaller_and_comes_back_exactly(tmp_path, sparsity, ratio, criterion):
    torch.manual_seed(0)
    model = lenet()
    prune(model, score(model, criterion), sparsity)
    save(model, tmp_path)
    dense = 4 * sum(p.numel() for p in model.parameters())
    assert dense / size(tmp_path) >= ratio
    assert_same(load(tmp_path, lenet), model)


def test_every_bit_of_every_kind_of_tensor(tmp_path):
    torch.manual_seed(0)
    model = Mixed()
    with torch.no_grad():
        for layer in (model.first, model.narrow):
            layer.weight.masked_fill_(torch.rand(40, 40) < 0.9, 0)
            layer.weight[0, :4] = torch.tensor([0.0, float("nan"), float("inf"), 1e-45])
        model.norm.running_var.mul_(3)
        model.norm.num_batches_tracked += 12345678901
    save(model, tmp_path)
    restored = load(tmp_path, Mixed)
    assert_same(restored, model)
    assert restored.tied.weight is restored.first.weight
    plan = json.loads((tmp_path / "plan.json").read_text())
    assert plan["tensors"]["tied.weight"] == {"same": "first.weight"}


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
def test_negative_weights_times_zero_take_no_room(tmp_path, dtype):
    torch.manual_seed(0)
    model = lenet().to(dtype)
    masks = prune(model, score(model, "random"), 0.9).masks
    save(model, tmp_path / "plus")
    for name, p in model.named_parameters():
        if name in masks:
            p.data[~masks[name]] = -0.0
    save(model, tmp_path / "minus")
    assert size(tmp_path / "minus") == size(tmp_path / "plus")
    restored = load(tmp_path / "minus", lambda: lenet().to(dtype))
    assert all(torch.equal(a, b) for a, b in zip(restored.parameters(), model.parameters(), strict=True))


def test_masks_travel_along_even_where_a_kept_weight_is_zero(tmp_path):
    torch.manual_seed(0)
    model = lenet()
    pruned = prune(model, score(model, "magnitude"), 0.9)
    with torch.no_grad():
        kept = pruned.masks["8.weight"].nonzero()[0]
        model[8].weight[tuple(kept)] = 0
    save(model, tmp_path, masks=pruned.masks)
    masks = load_masks(tmp_path)
    assert set(masks) == set(pruned.masks)
    assert all(torch.equal(masks[n], pruned.masks[n]) for n in masks)
    assert_same(load(tmp_path, lenet), model)
    save(model, tmp_path)
    nonzero = load_masks(tmp_path)["8.weight"]
    assert torch.equal(nonzero, model[8].weight != 0)


def test_masks_that_are_not_in_force_are_refused_before_anything_is_written(tmp_path):
    model = lenet()
    pruned = prune(model, score(model, "magnitude"), 0.5)
    with torch.no_grad():
        model[8].weight.add_(1)
    with pytest.raises(ValueError, match=r"of '8\.weight' are not zero"):
        save(model, tmp_path / "new", masks=pruned.masks)
    assert not (tmp_path / "new").exists()


def test_saving_again_replaces_and_an_interrupted_save_keeps_the_old(tmp_path, monkeypatch):
    torch.manual_seed(0)
    old, new = lenet(), lenet()
    save(old, tmp_path)

    def fail(*_):
        raise OSError("no space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(saved, "write_json", fail)
        with pytest.raises(OSError, match="no space"):
            save(new, tmp_path)
    assert_same(load(tmp_path, lenet), old)
    save(new, tmp_path)
    assert_same(load(tmp_path, lenet), new)
    assert len(list(tmp_path.iterdir())) == 2


def test_loading_into_a_network_changes_it_only_if_everything_fits(tmp_path):
    model = lenet()
    save(model, tmp_path)
    other = lenet()
    assert load(tmp_path, other) is other
    assert_same(other, model)
    wide = nn.Sequential(*list(lenet())[:-1], nn.Linear(84, 11))
    before = {n: t.clone() for n, t in wide.state_dict().items()}
    with pytest.raises(ValueError, match=r"'10\.weight' is 10x84 float32 in the file and 11x84 float32 in the network"):
        load(tmp_path, wide)
    assert all(torch.equal(before[n], t) for n, t in wide.state_dict().items())
    with pytest.raises(ValueError, match=r"unknown to the network.* and 4 more"):
        load(tmp_path, lambda: nn.Sequential(nn.Conv2d(1, 6, 5)))
    with pytest.raises(ValueError, match=r"'11\.weight' is missing in the file"):
        load(tmp_path, lambda: nn.Sequential(*lenet(), nn.Linear(10, 10)))
    with pytest.raises(TypeError, match="returned a int"):
        load(tmp_path, lambda: 3)


def test_damaged_and_foreign_folders_are_named(tmp_path):
    model = lenet()
    prune(model, score(model, "magnitude"), 0.9)
    save(model, tmp_path)
    plan_file = tmp_path / "plan.json"
    (weights,) = tmp_path.glob("weights-*")
    plan, content = json.loads(plan_file.read_text()), weights.read_bytes()

    def expect(message, error=ValueError):
        with pytest.raises(error, match=message):
            load(tmp_path, lenet)

    weights.write_bytes(content[:-100] + bytes([content[-100] ^ 1]) + content[-99:])
    expect("its contents do not match")
    weights.write_bytes(content[:-7])
    expect("not a readable safetensors file")
    weights.unlink()
    expect("is incomplete", FileNotFoundError)
    weights.write_bytes(content)
    wrong = {"shape": "7x7", "type": "float32", "code": "bits"}
    for change, message in [
        ({"format": "other"}, "another program wrote it"),
        ({"version": 9}, "version 9 .* a newer shaver wrote it"),
        ({"tensors": None}, "is damaged: one of"),
        ({"tensors": plan["tensors"] | {"0.weight": wrong}}, "damaged at '0.weight': a bit mask of the wrong length"),
        ({"tensors": plan["tensors"] | {"0.weight": {"same": "nobody"}}}, "damaged at '0.weight'"),
        ({"tensors": plan["tensors"] | {"0.weight": 5}}, "damaged at '0.weight'"),
    ]:
        plan_file.write_text(json.dumps(plan | change))
        expect(message)
    plan_file.write_text("[1, 2")
    expect("not valid JSON")
    plan_file.unlink()
    expect("holds no saved network", FileNotFoundError)
    with pytest.raises(FileNotFoundError, match="holds no saved network"):
        load_masks(tmp_path)
    save_tensors(tmp_path / "other" / "x.safetensors", {"a": torch.ones(1)})
    with pytest.raises(FileNotFoundError, match="holds no saved network"):
        load(tmp_path / "other", lenet)


@pytest.mark.parametrize("stored", [torch.float64, torch.bfloat16, torch.float16])
def test_the_network_takes_the_precision_of_the_file(tmp_path, stored):
    torch.manual_seed(0)
    model = lenet().to(stored)
    save(model, tmp_path)
    built = lenet()
    first = built[0].weight
    for restored in (load(tmp_path, lenet), load(tmp_path, built)):
        assert_same(restored, model)
    assert built[0].weight is first  # an optimizer that holds it stays valid
    restored(torch.ones(1, 1, 28, 28, dtype=stored)).sum().backward()
    assert first.grad.dtype == stored


def test_a_file_of_whole_numbers_is_no_network_of_floats(tmp_path):
    model = nn.Linear(3, 2)
    integers = nn.Linear(3, 2)
    integers.weight = nn.Parameter(torch.ones(2, 3, dtype=torch.int64), requires_grad=False)
    save(integers, tmp_path)
    with pytest.raises(ValueError, match="'weight' is 2x3 int64 in the file and 2x3 float32 in the network"):
        load(tmp_path, model)
    assert model.weight.dtype == torch.float32


def test_files_of_the_user_stay_in_the_folder(tmp_path):
    own = tmp_path / "weights-of-my-thesis.safetensors"
    save_tensors(own, {"precious": torch.ones(1)})
    for _ in range(2):
        save(lenet(), tmp_path)
    assert own.is_file()
    assert len(list(tmp_path.iterdir())) == 3


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 3000),
    st.sampled_from([0.0, 0.3, 0.9, 0.99, 0.999, 1.0]),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8]),
    st.integers(0, 2**31),
)
def test_the_code_is_exact_and_never_longer_than_dense(length, zeros, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    tensor = (torch.randn(length, generator=generator) * 50).to(dtype)
    tensor[torch.rand(length, generator=generator) < zeros] = 0
    code, parts = encode(tensor)
    assert sum(p.numel() * p.element_size() for p in parts.values()) <= tensor.numel() * tensor.element_size()
    restored, present = decode(code, parts, tensor.shape)
    assert torch.equal(restored, tensor)
    assert present is None or torch.equal(present, tensor != 0)


def test_each_code_has_its_place():
    def code(length, every):
        tensor = torch.zeros(length)
        tensor[::every] = 1
        return encode(tensor)[0]

    assert [code(10**5, every) for every in (1, 3, 100, 20000)] == ["dense", "bits", "gaps", "indices"]


@pytest.mark.parametrize(
    ("code", "where", "message"),
    [
        ("bits", torch.zeros(9, dtype=torch.uint8), "wrong length"),
        ("gaps", torch.tensor([3, 255], dtype=torch.uint8), "incomplete gaps"),
        ("gaps", torch.tensor([3, 99], dtype=torch.uint8), "outside the tensor"),
        ("indices", torch.tensor([5, 2], dtype=torch.int32), "out of order"),
        ("indices", torch.tensor([1], dtype=torch.int32), "2 values for 1 positions"),
        ("zip", torch.tensor([1, 2], dtype=torch.int32), "unknown code"),
    ],
)
def test_codes_that_make_no_sense_are_refused(code, where, message):
    with pytest.raises(ValueError, match=message):
        decode(code, {"where": where, "values": torch.ones(2)}, torch.Size([4, 4]))


def test_a_run_whose_newest_checkpoint_is_cut_short_is_read_from_the_one_before(tmp_path):
    model = shaver.zoo.build("fcn", seed=0, inputs=6, hidden=[8], classes=3)
    data = [(torch.randn(16, 6), torch.arange(16) % 3)]
    shaver.fit(model, data, epochs=3, folder=tmp_path, spam={"every": 1, "update": 1})
    assert shaver.files.load_trained(tmp_path).posterior is not None
    newest = tmp_path / "checkpoint-00003.safetensors"
    newest.write_bytes(newest.read_bytes()[:-10])
    with pytest.warns(UserWarning, match=r"checkpoint-00003\.safetensors is .*damaged.*checkpoint-00002.* is used"):
        trained = shaver.files.load_trained(tmp_path)
    assert trained.posterior is None  # it belongs to the last weights
    before = load_state(tmp_path / "checkpoint-00002.safetensors")["model"]
    assert all(torch.equal(before[name], value) for name, value in trained.model.state_dict().items())


def test_a_file_cannot_ask_for_more_memory_than_its_weights_need(tmp_path):
    model = shaver.zoo.build("fcn", seed=0, inputs=6, hidden=[8], classes=3)
    save(model, tmp_path)
    plan = json.loads((tmp_path / "plan.json").read_text())
    for hidden, message in (([2**40], "does not fit FCN"), ([8] * 50, "does not fit FCN"), ("wide", "cannot be built")):
        (tmp_path / "plan.json").write_text(json.dumps(plan | {"network": plan["network"] | {"hidden": hidden}}))
        with pytest.raises(ValueError, match=message):
            load(tmp_path)
