"""The embedded data sets, validation splits and the names a user may pass."""

import sys

import numpy as np
import pytest
import torch

from shaver.data import FlipCrop, load, names


def test_names_are_the_ones_that_load():
    assert names() == ("cancer", "digits", "mnist", "fashion", "cifar10", "cifar100", "imdb")


@pytest.mark.parametrize(
    ("name", "sizes", "shape", "classes"), [("cancer", (455, 114), (30,), 2), ("digits", (1438, 359), (1, 8, 8), 10)]
)
def test_embedded_sets_are_split_80_20_and_whole(name, sizes, shape, classes):
    from sklearn import datasets

    official = {"cancer": datasets.load_breast_cancer, "digits": datasets.load_digits}[name](return_X_y=True)
    splits = load(name)
    assert (len(splits.train), len(splits.test)) == sizes
    assert (splits.name, splits.valid, splits.input_shape, splits.classes) == (name, None, shape, classes)
    rows = torch.cat([splits.train.inputs, splits.test.inputs]).flatten(1).double().numpy()
    labels = torch.cat([splits.train.targets, splits.test.targets]).numpy()
    ours = np.column_stack([rows, labels]).astype(np.float32)
    theirs = np.column_stack(official).astype(np.float32)
    assert np.array_equal(ours[np.lexsort(ours.T)], theirs[np.lexsort(theirs.T)])


def test_cancer_is_standardised_by_its_training_and_validation_parts_together():
    splits = load("cancer", valid_fraction=0.2, seed=3)
    assert splits.valid is not None
    x = torch.cat([splits.train[:][0], splits.valid[:][0]])
    torch.testing.assert_close(x.mean(0), torch.zeros(30), atol=1e-5, rtol=0)
    torch.testing.assert_close(x.std(0, correction=0), torch.ones(30), atol=1e-5, rtol=0)
    assert torch.equal(splits.test[:][0], load("cancer", seed=3).test[:][0])  # whatever the fraction
    raw = torch.cat([splits.train.inputs, splits.valid.inputs]).double()
    for part in (splits.valid, splits.test):
        expected = (part.inputs.double() - raw.mean(0)) / raw.std(0, correction=0)
        torch.testing.assert_close(part[:][0].double(), expected, atol=1e-4, rtol=1e-4)
        assert part[:][0].mean(0).abs().max() > 1e-3  # its own constants would give 0


def test_the_seed_decides_the_split():
    one, same, other = (load("digits", seed=seed) for seed in (4, 4, 5))
    assert torch.equal(one.train.inputs, same.train.inputs)
    assert not torch.equal(one.train.inputs, other.train.inputs)


def test_validation_is_taken_out_of_the_training_part():
    whole, held = load("digits"), load("digits", valid_fraction=0.25)
    assert held.valid is not None
    assert (len(held.valid), len(held.train)) == (360, 1078)  # round(1438 / 4)
    assert torch.equal(held.test.inputs, whole.test.inputs)

    def rows(*parts):
        return torch.cat([torch.column_stack([p.inputs.flatten(1), p.targets]) for p in parts])

    together, train = rows(held.train, held.valid), rows(whole.train)
    assert torch.equal(together[np.lexsort(together.numpy().T)], train[np.lexsort(train.numpy().T)])
    again, other = load("digits", valid_fraction=0.25), load("digits", valid_fraction=0.25, seed=1)
    assert torch.equal(again.valid.inputs, held.valid.inputs)
    assert not torch.equal(other.valid.inputs, held.valid.inputs)


def test_only_the_training_part_is_augmented():
    splits = load("digits", augment=True, valid_fraction=0.1)
    assert splits.train.augment == FlipCrop(pad=1, flip=False)
    assert splits.valid.augment is None
    assert splits.test.augment is None
    assert load("digits").train.augment is None


def test_loading_leaves_the_global_generators_alone():
    torch_state, numpy_state = torch.get_rng_state(), np.random.get_state()[1].copy()
    load("cancer", valid_fraction=0.1)
    assert torch.equal(torch.get_rng_state(), torch_state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"name": "mnst"}, "unknown data set 'mnst'; did you mean 'mnist'.* Valid: 'cancer', 'digits'"),
        ({"name": None}, "unknown data set None"),
        ({"name": "cancer", "valid_fraction": 1.0}, "below 1, not 1.0"),
        ({"name": "cancer", "valid_fraction": -0.1}, "not -0.1"),
        ({"name": "cancer", "valid_fraction": float("nan")}, "not nan"),
        ({"name": "cancer", "valid_fraction": 1e-6}, "leaves one of the two parts empty"),
        ({"name": "cancer", "seed": -1}, "seed must be an integer of at least 0"),
        ({"name": "cancer", "augment": True}, "'cancer' has no images to augment.*'cifar10'"),
        ({"name": "imdb", "augment": True}, "'imdb' has no images"),
    ],
)
def test_bad_arguments_are_answered_with_what_would_work(arguments, message):
    with pytest.raises(ValueError, match=message):
        load(**arguments)


def test_a_missing_package_is_named_with_its_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r'needs scikit-learn: pip install "shaver\[data\]"'):
        load("cancer")
