"""Public functions with arguments that work, values that they cannot have, and what becomes of each such call."""

import contextlib
import copy
import inspect
import tempfile
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shaver
from shaver.curvature import OnlineCurvature, estimate
from shaver.evidence import fit_prior
from shaver.measure import cost, quality
from shaver.structure import find_groups

PACKAGE = str(Path(shaver.__file__).parent)
X, Y = torch.linspace(-1, 1, 48).reshape(12, 4), torch.arange(12) % 3
DATA = [(X, Y)]
VALUES: dict[str, Any] = {
    "None": None,
    "'x'": "x",
    "-1": -1,
    "2.5": 2.5,
    "nan": float("nan"),
    "True": True,
    "1j": 1j,
    "[]": [],
    "[None]": [None],
    "{}": {},
    "{'x': 1}": {"x": 1},
    "object()": object(),
    "ones(2, 2)": torch.ones(2, 2),
    "nn.Linear": nn.Linear,
}


def net() -> nn.Module:
    """A small network, always the same."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))


def calls(folder: Path) -> list[tuple[Callable[..., Any], dict[str, Any]]]:
    """Functions with arguments that work."""
    model = net()
    curvature = estimate(model, DATA)
    posterior = shaver.Posterior(curvature, 1.0, model)
    scores = shaver.score(model, "magnitude")
    pruned = net()
    masks = shaver.prune(pruned, scores, 0.5).masks
    shaver.save(model, folder / "network")
    return [
        (estimate, {"model": model, "batches": DATA}),
        (OnlineCurvature, {"model": net(), "data_size": 12}),
        (shaver.SpaM, {"model": net(), "data_size": 12, "total_steps": 10}),
        (shaver.Posterior, {"curvature": curvature, "prior": 1.0, "theta": model}),
        (shaver.log_evidence, {"model": model, "curvature": curvature, "prior_precision": 1.0}),
        (fit_prior, {"model": model, "curvature": curvature}),
        (shaver.score, {"model": model, "criterion": "opd", "posterior": posterior}),
        (shaver.score, {"model": model, "criterion": "snip", "batches": DATA}),
        (shaver.prune, {"model": net(), "scores": scores, "sparsity": 0.5}),
        (shaver.prune, {"model": net(), "scores": scores, "valid": DATA, "max_drop": 1.0}),
        (shaver.repair, {"model": net(), "batches": DATA, "reference": model, "masks": masks}),
        (shaver.recalibrate, {"model": net(), "batches": DATA}),
        (find_groups, {"model": model, "example": X}),
        (shaver.compact, {"model": model, "example": X, "criterion": "magnitude", "sparsity": 0.4}),
        (shaver.fit, {"model": net(), "train": DATA, "epochs": 1, "method": "map"}),
        (shaver.save, {"model": pruned, "folder": folder / "other", "masks": masks}),
        (shaver.load, {"path": folder / "network", "factory": net}),
        (shaver.sparse_inference, {"model": net(), "example": X}),
        (quality, {"model": model, "batches": DATA}),
        (cost, {"model": model, "example": X}),
    ]


def outcome(function: Callable[..., Any], arguments: dict[str, Any]) -> tuple[str, str]:
    """What became of a call, and the error."""
    try:
        function(**arguments)
    except Exception as error:
        last = traceback.extract_tb(error.__traceback__)[-1]
        ours = last.filename.startswith(PACKAGE) and (last.line or "").startswith("raise")
        return "answered" if ours else "unclear", f"{type(error).__name__}: {str(error)[:150]} ({last.line})"
    return "taken", ""


def attempts(values: Iterable[str] = VALUES) -> Iterator[tuple[str, str, str]]:
    """Replace every argument of every function by each value: (the call in words, its outcome, the error)."""
    # in a folder of its own, because a name such as "x" is a folder to write to
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for function, arguments in calls(Path(folder)):
            start = copy.deepcopy(arguments.get("model"))  # a call may leave hooks or other weights
            result, words = outcome(function, arguments)
            assert result == "taken", words
            plain = (p for p in inspect.signature(function).parameters.values() if p.kind is not p.VAR_KEYWORD)
            for argument in (p.name for p in plain):
                for written in values:
                    fresh = {} if start is None else {"model": copy.deepcopy(start)}
                    yield (
                        f"{function.__name__}({argument}={written})",
                        *outcome(function, {**arguments, **fresh, argument: VALUES[written]}),
                    )
