"""The benchmark behind the published training times runs: it uses parts of SpaM that no user calls."""

import importlib.util
import sys
from pathlib import Path

import pytest
import torch


def test_the_benchmark_times_every_kind_of_step(monkeypatch: pytest.MonkeyPatch):
    file = Path(__file__).parents[2] / "benchmarks" / "spam.py"
    spec = importlib.util.spec_from_file_location("spam_benchmark", file)
    assert spec is not None
    assert spec.loader is not None
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, benchmark)  # dataclasses look their module up
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(torch, "set_num_threads", lambda count: None)  # it would stay for the other tests
    monkeypatch.setitem(benchmark.TIMED, "lenet", ((1, 28, 28), 8, 1))
    found = benchmark.timing("lenet")
    kinds = [
        "passes",
        "measured passes",
        "SpaM step",
        "SpaM step after an update",
        "measured step",
        "MAP step",
        "update",
    ]
    assert found.keys() == {"ratio", *(f"{kind}, ms" for kind in kinds)}
    assert found["ratio"] > 0
