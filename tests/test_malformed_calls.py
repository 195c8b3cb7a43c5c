"""Malformed calls are answered in shaver's own words, before anything is changed.

The last line of the traceback tells who speaks: it is a ``raise`` of this package, and not of torch or Python.
"""

import re
import traceback
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import shaver
from tests.malformed import attempts

PACKAGE = str(Path(shaver.__file__).parent)
NAN = float("nan")


def written(value: object) -> str:
    """The value as a test's name: the same in every process, so without addresses."""
    return re.sub(r" at 0x\w+", "", repr(value))


def net() -> nn.Sequential:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


X = torch.linspace(-1, 1, 48).reshape(12, 4)
Y = torch.arange(12) % 3
DATA = [(X, Y)]
SCORES = shaver.score(net(), "magnitude")
LAZY, META, COMPLEX = nn.LazyLinear(3), nn.Linear(3, 3, device="meta"), nn.Linear(3, 3, dtype=torch.complex64)

NETWORKS = {"None": None, "class": nn.Linear, "empty": nn.ReLU(), "lazy": LAZY, "meta": META, "complex": COMPLEX}
TRAIN = {
    "None": None,
    "number": 3,
    "no batches": [],
    "None batch": [None],
    "arrays": [(X.numpy(), Y.numpy())],
    "array of inputs": [(X.numpy(), Y)],
    "tensor": X,
    "pair": (X, Y),
    "bool targets": [(X, Y > 0)],
    "real targets": [(X, Y.float())],
    "one-hot targets": [(X, torch.eye(3)[Y])],
    "narrow": [(X[:, :3], Y)],
    "double": [(X.double(), Y)],
    "integers": [(X.long(), Y)],
    "labels": [(X, Y + 5)],
    "fewer targets": [(X, Y[:5])],
    "NaN": [(X * NAN, Y)],
}
FIT = {
    "epochs": [1.5, "3", None, -1, True, NAN],
    "lr": ["0.1", NAN, float("inf"), 0, [0.1]],
    "batch_size": [0, "8", None],
    "seed": ["a", None, 1.5, -1],
    "method": [None, 3, "mapp"],
    "spam": [["prior"], {"priorr": "unit"}, {"prior": "unitt"}, {"seed": 3}],
    "masks": [{}, [1]],
    "online": [0.9, "auto"],
    "options": [{"clip": 1.0}],
    "optimizer": [3, "sdg", lambda parameters: 3],
    "likelihood": [3, "clasification"],
    "logger": [3, "tensorbord"],
    "forward": [3],
    "clip": ["a", 0, NAN],
    "weight_decay": ["a", -1],
    "resume": ["yes"],
    "folder": [3],
    "epoch": [3],
    "early_stopping": [0, 2.5],
    "valid": [3, [], [None], [(X[:, :2], Y)], [(X, Y + 9)], [(X * NAN, Y)]],
}
PRUNE = [
    {"model": None},
    {"model": nn.Linear(4, 5)},
    {"model": nn.ReLU()},
    {"model": META},
    {"scores": None},
    {"scores": [1]},
    {"scores": {}},
    {"scores": {name: values.numpy() for name, values in SCORES.items()}},
    {"scores": {name: values * NAN for name, values in SCORES.items()}},
    *({"sparsity": wrong} for wrong in (95, 1, -0.1, "half", None, NAN, torch.tensor(0.5), [0.5])),
    *({"scope": wrong} for wrong in (None, 24, "2:4:8", "4:2", "0:4")),
    *({"cap": wrong} for wrong in ("a", None, 0, 2)),
    *({"minimum": wrong} for wrong in (None, "2", -1, 1.5)),
    {"sparsity": "auto"},
    {"sparsity": None, "max_drop": 0.1},
    {"sparsity": None, "max_drop": "a", "valid": DATA},
    {"sparsity": None, "max_drop": NAN, "valid": DATA},
    *({"sparsity": None, "max_drop": 0.1, "valid": wrong} for wrong in (3, [], [None], lambda model: "a")),
    {"sparsity": None, "max_drop": 0.1, "valid": lambda model: NAN},
]
SCORE = [
    {"model": None},
    {"model": nn.ReLU()},
    {"model": LAZY},
    {"criterion": None},
    {"criterion": "magnitud"},
    {"criterion": "opd"},
    {"criterion": "snip"},
    *({"criterion": "snip", "batches": TRAIN[name]} for name in TRAIN if name not in ("double", "tensor")),
    {"criterion": "random", "seed": "a"},
]

LOG_EVIDENCE = [
    *({"model": wrong} for wrong in (None, nn.Linear, nn.ReLU(), nn.Linear(4, 5))),
    *({"curvature": wrong} for wrong in (None, 3, {"0.weight": X})),
    *({"prior_precision": wrong} for wrong in (None, "1", -1, 0, NAN, True, 1j, [1.0], {}, {"0.weight": 1.0})),
    *({"prior_precision": wrong} for wrong in (torch.ones(7), -torch.ones(()), torch.ones((), dtype=torch.cfloat))),
    *({"temperature": wrong} for wrong in (0, -1, "1", None, NAN, [1])),
]


def answered(call, *errors: type[Exception]) -> None:
    with pytest.raises(errors or (TypeError, ValueError)) as raised:
        call()
    last = traceback.extract_tb(raised.value.__traceback__)[-1]
    ours = last.filename.startswith(PACKAGE) and (last.line or "").startswith("raise")
    assert ours, f"{type(raised.value).__name__} of {last.filename}, {last.line}: {raised.value}"


@pytest.mark.parametrize("name", NETWORKS)
def test_fit_of_something_that_is_no_network(name):
    answered(lambda: shaver.fit(NETWORKS[name], DATA, epochs=1))


@pytest.mark.parametrize("method", ["map", "spam"])
@pytest.mark.parametrize("name", TRAIN)
def test_fit_on_something_that_is_no_data(name, method):
    model = net()
    answered(lambda: shaver.fit(model, TRAIN[name], epochs=1, method=method), TypeError, ValueError, shaver.Diverged)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), net().parameters(), strict=True))


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, values in FIT.items() for v in values], ids=written)
def test_fit_with_a_setting_that_cannot_be(name, value):
    how = {} if name in ("spam", "early_stopping") else {"method": "map"}
    answered(
        lambda: shaver.fit(net(), DATA, **{"epochs": 1, **how, name: value}), TypeError, ValueError, shaver.Diverged
    )


@pytest.mark.parametrize("change", PRUNE, ids=written)
def test_prune(change):
    model = net()
    answered(lambda: shaver.prune(**{"model": model, "scores": SCORES, "sparsity": 0.5, **change}))
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), net().parameters(), strict=True))


@pytest.mark.parametrize("change", SCORE, ids=written)
def test_score(change):
    answered(lambda: shaver.score(**{"model": net(), "criterion": "magnitude", **change}), TypeError, ValueError)


@pytest.mark.parametrize("change", LOG_EVIDENCE, ids=written)
def test_log_evidence(change):
    model = net()
    known = {"model": model, "curvature": shaver.curvature.estimate(model, DATA), "prior_precision": 1.0}
    assert shaver.log_evidence(**known) < 0
    answered(lambda: shaver.log_evidence(**{**known, **change}))


def test_save_and_load(tmp_path):
    file = tmp_path / "file"
    file.write_text("precious")
    shaver.save(net(), tmp_path / "network")
    for model in NETWORKS.values():
        answered(lambda model=model: shaver.save(model, tmp_path / "new"))
    for place in (file, file / "below"):
        answered(lambda place=place: shaver.save(net(), place), NotADirectoryError)
    for place in (3, None):
        answered(lambda place=place: shaver.save(net(), place))
        answered(lambda place=place: shaver.load(place, net))
    for masks in ([1], {"0.weight": torch.ones(5, 4)}, {"0.weight": torch.ones(2, 2, dtype=torch.bool)}, {"x": None}):
        answered(lambda masks=masks: shaver.save(net(), tmp_path / "new", masks))
    for factory in (None, 3, "net", lambda: 3, lambda: nn.Linear(2, 2)):
        answered(lambda factory=factory: shaver.load(tmp_path / "network", factory))
    for place in (tmp_path / "nowhere", tmp_path):
        answered(lambda place=place: shaver.load(place, net), FileNotFoundError)
    answered(lambda: shaver.load(file, net))
    assert file.read_text() == "precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "network"]


def test_sparse_inference_masks_and_schedules():
    for call in (
        lambda: shaver.sparse_inference(None, X),
        lambda: shaver.sparse_inference(net(), None),
        lambda: shaver.sparse_inference(net(), X[:, :2]),
        lambda: shaver.sparse_inference(net(), X, repeats=0),
        lambda: shaver.pruning.Masks([1]),
        lambda: shaver.pruning.Masks({"a": "b"}),
        lambda: shaver.pruning.Ranking(SCORES).at("a"),
        lambda: shaver.pruning.Online("0.9"),
        lambda: shaver.pruning.Online(0.9, start="a"),
        lambda: shaver.pruning.Online(0.9, every=2.5),
        lambda: shaver.pruning.Online(0.9, schedule=np.ones(3)),
    ):
        answered(call)


def test_every_argument_of_every_public_function():
    """``python benchmarks/malformed_calls.py`` tries more values."""
    found = list(attempts(["'x'", "2.5", "object()", "ones(2, 2)"]))
    assert len(found) > 500
    assert not [call for call in found if call[1] == "unclear"]
