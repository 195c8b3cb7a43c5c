"""Batches are slices by a seeded permutation, normalised like the formula says, and bad data are named."""

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler

from shaver.data import Batches, FlipCrop, InMemory


def images(n: int = 50, channels: int = 3, seed: int = 0) -> InMemory:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randint(0, 256, (n, channels, 6, 5), dtype=torch.uint8, generator=generator)
    return InMemory(inputs, torch.arange(n) % 10, mean=[0.1, 0.2, 0.3][:channels], std=[0.5, 0.25, 2.0][:channels])


def flat(batches: Iterable[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    x, y = zip(*batches, strict=True)
    return torch.cat(x), torch.cat(y)


def numbered(n: int = 103) -> InMemory:
    """A data set whose targets are the sample numbers."""
    return InMemory(torch.randn(n, 3, generator=torch.Generator().manual_seed(1)), torch.arange(n))


def test_uint8_images_are_normalised_by_channel_in_units_of_one():
    data = images()
    mean, std = torch.tensor([0.1, 0.2, 0.3]).view(3, 1, 1), torch.tensor([0.5, 0.25, 2.0]).view(3, 1, 1)
    x, y = data[:]
    torch.testing.assert_close(x, (data.inputs.float() / 255 - mean) / std)
    assert x.dtype == torch.float32
    assert torch.equal(y, data.targets)


def test_uint8_without_constants_lands_between_zero_and_one():
    data = InMemory(torch.tensor([[0, 255], [51, 102]], dtype=torch.uint8), torch.zeros(2))
    torch.testing.assert_close(data[:][0], torch.tensor([[0.0, 1.0], [0.2, 0.4]]))


def test_float_inputs_keep_their_dtype_and_values():
    inputs = torch.randn(4, 3, dtype=torch.float64)
    assert torch.equal(InMemory(inputs, torch.zeros(4))[:][0], inputs)
    x, _ = InMemory(inputs, torch.zeros(4), mean=[1.0, 2.0, 3.0], std=2.0)[:]
    torch.testing.assert_close(x, (inputs - torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64)) / 2)


def test_token_numbers_pass_as_they_are():
    tokens = torch.randint(0, 30000, (4, 7))
    x, _ = InMemory(tokens, torch.zeros(4)).batches(4).__iter__().__next__()
    assert torch.equal(x, tokens)


@pytest.mark.parametrize("index", [3, -1, torch.tensor(3)])
def test_a_number_gives_one_sample(index):
    data = images()
    x, y = data[index]
    everything = data[:]
    assert torch.equal(x, everything[0][index])
    assert torch.equal(y, everything[1][index])
    assert x.shape == data.input_shape == (3, 6, 5)


@pytest.mark.parametrize("index", [slice(2, 9, 3), [4, 0, -1], torch.tensor([4, 4, -2]), torch.arange(50) % 7 == 0])
def test_every_other_index_gives_a_batch(index):
    data = images()
    everything = data[:]
    x, y = data[index]
    assert torch.equal(x, everything[0][index])
    assert torch.equal(y, everything[1][index])


@pytest.mark.parametrize("index", [50, -51, [0, 50], torch.tensor([-51])])
def test_an_index_beyond_the_data_is_refused(index):
    with pytest.raises(IndexError):
        images()[index]


@pytest.mark.parametrize("shuffle", [False, True])
def test_changing_a_batch_in_place_leaves_the_data_set_alone(shuffle):
    data = numbered()
    before = data.inputs.clone()
    for x, y in data.batches(10, shuffle=shuffle):
        x.zero_()
        y.zero_()
    data[5][0].zero_()
    data[:][1].zero_()
    assert torch.equal(data.inputs, before)
    assert torch.equal(data.targets, torch.arange(103))


def test_an_epoch_visits_every_sample_once_with_its_own_target():
    data = numbered()
    x, y = flat(data.batches(16, shuffle=True, seed=3))
    assert torch.equal(y.sort().values, torch.arange(103))
    assert torch.equal(x, data.inputs[y])
    assert not torch.equal(y, torch.arange(103))


def test_without_shuffling_the_stored_order_stays():
    assert torch.equal(flat(numbered().batches(16))[1], torch.arange(103))


@pytest.mark.parametrize(("drop_last", "sizes"), [(False, [25, 25, 25, 25, 3]), (True, [25, 25, 25, 25])])
def test_the_last_batch_is_smaller_or_dropped(drop_last, sizes):
    batches = numbered().batches(25, drop_last=drop_last, shuffle=True)
    assert [len(y) for _, y in batches] == sizes
    assert len(batches) == len(sizes)
    assert batches.data_size == len(batches.dataset) == 103


def test_every_epoch_has_its_own_order_and_any_epoch_can_be_repeated():
    batches = numbered().batches(16, shuffle=True, seed=5)
    orders = [flat(batches)[1] for _ in range(4)]
    assert all(not torch.equal(a, b) for i, a in enumerate(orders) for b in orders[:i])
    batches.set_epoch(2)
    assert torch.equal(flat(batches)[1], orders[2])
    assert batches.epoch == 3
    resumed = numbered().batches(16, shuffle=True, seed=5, epoch=3)
    assert torch.equal(flat(resumed)[1], orders[3])
    assert not torch.equal(flat(numbered().batches(16, shuffle=True, seed=6))[1], orders[0])


def test_an_abandoned_epoch_counts_as_one():
    batches = numbered().batches(16, shuffle=True)
    next(iter(batches))
    assert batches.epoch == 1


def test_seed_one_epoch_zero_is_not_seed_zero_epoch_one():
    data = numbered()
    a = flat(data.batches(16, shuffle=True, seed=1, epoch=0))[1]
    b = flat(data.batches(16, shuffle=True, seed=0, epoch=1))[1]
    assert not torch.equal(a, b)


def test_neither_order_nor_augmentation_touches_the_global_generator():
    data = InMemory(torch.zeros(20, 1, 8, 8, dtype=torch.uint8), torch.zeros(20), augment=FlipCrop())
    before = torch.get_rng_state()
    first = flat(data.batches(7, shuffle=True))[1]
    assert torch.equal(torch.get_rng_state(), before)
    torch.manual_seed(99)
    assert torch.equal(flat(data.batches(7, shuffle=True))[1], first)


def test_augmentation_follows_seed_and_epoch_and_does_not_change_the_order():
    plain = images(channels=1)
    data = InMemory(plain.inputs, torch.arange(50), augment=FlipCrop(pad=2))
    (x0, y0), (x1, _) = (flat(data.batches(8, shuffle=True, seed=1, epoch=e)) for e in (0, 1))
    again, _ = flat(data.batches(8, shuffle=True, seed=1, epoch=0))
    unchanged, y = flat(data.batches(8, shuffle=True, seed=1, epoch=0, augment=False))
    assert torch.equal(x0, again)
    assert torch.equal(y0, y)
    assert not torch.equal(x0, x1)
    torch.testing.assert_close(unchanged, plain.inputs[y].float() / 255)
    assert not torch.equal(x0, unchanged)


def test_a_data_loader_gives_the_same_batches():
    data = images()
    ours = list(data.batches(16))
    for loader in (
        DataLoader(data, batch_size=16),
        DataLoader(data, batch_size=None, sampler=BatchSampler(SequentialSampler(data), 16, drop_last=False)),
    ):
        theirs = list(loader)
        assert len(theirs) == len(ours) == len(loader)
        assert all(torch.equal(a, b) for o, t in zip(ours, theirs, strict=True) for a, b in zip(o, t, strict=True))
        assert len(loader.dataset) == data.batches(16).data_size


def test_iterating_over_a_data_set_ends():
    assert len(list(images(7))) == 7  # type: ignore[call-overload]


def test_ignored_labels_are_welcome():
    assert len(InMemory(torch.zeros(2, 1), torch.tensor([-100, 1]), classes=2)) == 2


def test_large_finite_values_are_no_infinity():
    big = torch.finfo(torch.float32).max
    assert len(InMemory(torch.tensor([[big], [-big]]), torch.zeros(2))) == 2


U8 = torch.uint8
BAD = {
    "out of range": (
        torch.zeros(3, 2),
        torch.tensor([0, 10, 2]),
        {"classes": 10},
        "label 10 of sample 1 is out of range",
    ),
    "negative": (torch.zeros(3, 2), torch.tensor([0, 1, -1]), {"classes": 10}, "label -1 of sample 2"),
    "real labels": (torch.zeros(3, 2), torch.zeros(3), {"classes": 10}, "integers"),
    "empty": (torch.zeros(0, 2), torch.zeros(0), {}, r"empty: its inputs have shape \(0, 2\)"),
    "one dimension": (torch.zeros(3), torch.zeros(3), {}, r"not \(3,\)"),
    "lengths": (torch.zeros(3, 2), torch.zeros(4), {}, "3 inputs but 4 targets"),
    "NaN": (torch.tensor([[0.0], [float("nan")]]), torch.zeros(2), {}, "inputs hold NaN.* in 1 of 2 .*sample 1"),
    "infinity": (torch.tensor([[float("-inf")], [0.0]]), torch.zeros(2), {}, "inputs hold NaN.*sample 0"),
    "NaN target": (torch.zeros(2, 1), torch.tensor([0.0, float("nan")]), {}, "targets hold NaN.*sample 1"),
    "no channels": (torch.zeros(3, 8, 8, dtype=U8), torch.zeros(3), {}, "channels, height, width"),
    "channels last": (torch.zeros(3, 8, 8, 3, dtype=U8), torch.zeros(3), {}, "channels last"),
    "mean size": (torch.zeros(3, 4), torch.zeros(3), {"mean": [1.0, 2.0]}, "mean has 2 numbers.*4"),
    "std zero": (torch.zeros(3, 2), torch.zeros(3), {"std": [1.0, 0.0]}, "positive"),
    "mean NaN": (torch.zeros(3, 2), torch.zeros(3), {"mean": float("nan")}, "finite"),
    "tokens": (torch.zeros(3, 2, dtype=torch.long), torch.zeros(3), {"mean": 1.0}, "indices"),
}


@pytest.mark.parametrize("case", BAD)
def test_bad_data_are_named_where_they_enter(case):
    inputs, targets, options, message = BAD[case]
    with pytest.raises(ValueError, match=message):
        InMemory(inputs, targets, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size must be an integer of at least 1, not 0"),
        ({"batch_size": 200, "drop_last": True}, "leaves no batch"),
        ({"batch_size": 2, "seed": -1}, "seed must be an integer of at least 0"),
        ({"batch_size": 2, "epoch": -1}, "epoch must be an integer of at least 0"),
    ],
)
def test_impossible_batches_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Batches(numbered(), **options)
