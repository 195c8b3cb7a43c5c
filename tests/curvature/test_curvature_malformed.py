"""Malformed calls of ``estimate``, ``OnlineCurvature`` and ``SpaM``: each error repeats what was passed."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver import SpaM
from shaver.curvature import OnlineCurvature, estimate


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def batch(**changes: Any) -> tuple[Any, Any]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(6, 4, generator=generator), torch.arange(6) % 3
    return changes.get("x", x), changes.get("y", y)


X, Y = batch()
EYE = torch.eye(4, dtype=torch.complex64)

DATA: dict[str, tuple[Any, str]] = {
    "bool targets": ([batch(y=Y > 0)], "torch.bool"),
    "float targets": ([batch(y=Y.float())], 'likelihood="regression"'),
    "targets of a regression": ([batch(y=torch.randn(6, 1))], 'likelihood="regression"'),
    "numpy inputs": ([batch(x=X.numpy())], "numpy array"),
    "numpy everything": ([(X.numpy(), Y.numpy())], "numpy array"),
    "no batches": (None, "list of batches"),
    "a batch that is None": ([None], "NoneType"),
    "one batch in place of a list": (batch(), r"\[\(x, y\)\]"),
    "a tensor": (X, "list of batches"),
    "wrong width": ([batch(x=torch.randn(6, 7))], r"\(3, 7\) torch.float32"),
    "wrong precision": ([batch(x=X.double())], "float64"),
    "integer inputs": ([batch(x=X.long())], "int64"),
    "targets too few": ([batch(y=Y[:4])], r"\(6,\)"),
    "a label out of range": ([batch(y=Y + 5)], "out of range"),
    "not a number": ([batch(x=X * torch.nan)], "NaN"),
}


@pytest.mark.parametrize("name", DATA)
def test_data(name: str):
    batches, message = DATA[name]
    with pytest.raises((ValueError, TypeError), match=message):
        estimate(net(), batches)


def test_small_integers_are_labels():
    exact = estimate(net(), [batch()]).diagonal()
    for kind in (torch.int32, torch.uint8):
        found = estimate(net(), [batch(y=Y.to(kind))]).diagonal()
        assert all(torch.equal(found[name], exact[name]) for name in exact)


def lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(5), nn.Linear(5, 3))


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 3, dtype=torch.complex64))

    def forward(self, x: Tensor) -> Tensor:
        return (x.to(torch.complex64) @ self.weight).abs()


class SparseWeight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(4).to_sparse())


MODELS: dict[str, tuple[Callable[[], Any], str]] = {
    "no parameters": (nn.Tanh, "no trainable parameter"),
    "a function": (lambda: torch.tanh, "torch.nn.Module"),
    "lazy": (lazy, "'0.weight' is lazy"),
    "meta": (lambda: net().to("meta"), "'0.weight' is on the meta device"),
    "complex": (Complex, "'weight' is a torch.complex64"),
    "sparse": (SparseWeight, "'weight' is a torch.float32 tensor with layout torch.sparse_coo"),
}


@pytest.mark.parametrize("name", MODELS)
def test_models(name: str):
    build, message = MODELS[name]
    with pytest.raises((ValueError, TypeError), match=message):
        estimate(build(), [batch()])
    with pytest.raises((ValueError, TypeError), match=message):
        OnlineCurvature(build(), 6)
    with pytest.raises((ValueError, TypeError, AttributeError), match=message):
        SpaM(build(), 6)


def test_sparse_gradients_of_an_embedding():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(5, 4, sparse=True), nn.Flatten(), nn.Linear(8, 3))
    batches = [(torch.tensor([[0, 1], [2, 2], [3, 1]]), torch.arange(3))]
    sparse = estimate(model, batches).diagonal()
    model[0].sparse = False
    dense = estimate(model, batches).diagonal()
    assert all(torch.equal(sparse[name], dense[name]) for name in dense)


NUMBERS: dict[str, tuple[dict[str, Any], str]] = {
    "samples": ({"samples": 0}, "samples must be an integer of at least 1, not 0"),
    "half a sample": ({"samples": 1.5}, r"samples must be an integer of at least 1, not 1\.5"),
    "seed": ({"seed": "seven"}, "seed must be an integer of at least 0, not 'seven'"),
    "fraction": ({"fraction": "half"}, "fraction must be a finite number above 0 and at most 1, not 'half'"),
    "too large": ({"fraction": 2}, "fraction must be a finite number above 0 and at most 1, not 2"),
    "max_samples": ({"max_samples": 0}, "max_samples must be an integer of at least 1, not 0"),
    "budget": ({"memory_budget": "1 GB"}, "memory_budget must be an integer of at least 1, not '1 GB'"),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_numbers_of_an_estimate(name: str):
    options, message = NUMBERS[name]
    with pytest.raises(ValueError, match=message):
        estimate(net(), [batch()], **options)


SPAM: dict[str, tuple[dict[str, Any], str]] = {
    "every": ({"every": 2.5}, r"every must be an integer of at least 1, not 2\.5"),
    "update": ({"update": "often"}, "update must be an integer of at least 1, not 'often'"),
    "frequency": ({"frequency": None}, "frequency must be an integer of at least 1, not None"),
    "decay": ({"decay": None}, "decay must be a finite number from 0 to 1, not None"),
    "a decay of one": ({"decay": 1.0}, r"decay must be below 1, not 1\.0"),
    "burn_in": ({"burn_in": "none"}, "burn_in must be a finite number of at least 0, not 'none'"),
    "shrink": ({"shrink": 2}, "shrink must be a finite number from 0 to 1, not 2"),
    "temperature": ({"temperature": float("nan")}, "temperature must be a finite number above 0, not nan"),
    "initial_precision": ({"initial_precision": 0}, "initial_precision must be a finite number above 0, not 0"),
    "bounds": ({"bounds": (2.0, 1.0)}, "lowest and the highest log δ"),
    "online": ({"online": "yes"}, "online must be True or False, not 'yes'"),
    "total_steps": ({"total_steps": 10.5}, r"total_steps must be an integer of at least 1, not 10\.5"),
    "seed": ({"seed": None}, "seed must be an integer of at least 0, not None"),
    "settings": ({"settings": {"every": 3}}, r"settings must be shaver.settings.Settings\(…\), not"),
    "an unknown option": ({"evry": 3}, "did you mean 'every'"),
}


@pytest.mark.parametrize("name", SPAM)
def test_numbers_of_spam(name: str):
    options, message = SPAM[name]
    with pytest.raises((ValueError, TypeError), match=message):
        SpaM(net(), 6, **options)


@pytest.mark.parametrize("size", [None, "6", 6.5, True, 0])
def test_the_size_of_the_data(size: Any):
    with pytest.raises(ValueError, match="data_size, the number of training samples"):
        SpaM(net(), size)


@pytest.mark.parametrize("source", ["mc", "ef"])
@pytest.mark.parametrize("likelihood", ["classification", "regression"])
def test_data_that_are_not_numbers_in_training(source: str, likelihood: str):
    model = net()
    spam = SpaM(model, 6, source=source, likelihood=likelihood, every=1)
    x, y = X * torch.nan, Y if likelihood == "classification" else torch.randn(6, 3)
    loss = F.cross_entropy(model(x), y) if likelihood == "classification" else F.mse_loss(model(x), y)
    loss.backward()
    with pytest.raises(FloatingPointError, match="NaN or infinity"):
        spam.step(torch.optim.SGD(model.parameters(), lr=0.1))


def test_a_numpy_number_is_a_number():
    assert SpaM(net(), np.int64(6), every=np.int64(2), decay=np.float64(0.5)).settings.every == 2
