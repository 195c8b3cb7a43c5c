"""Every script in examples/ runs, with settings that take seconds, and says something true."""

import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from shaver.criteria import registry
from shaver.curvature import rules

EXAMPLES = Path(__file__).parents[2] / "examples"
SETTINGS = {
    "choose_prior": ["--epochs", "1"],
    "language_model": ["--epochs", "1"],
    "make_smaller": ["--epochs", "3", "--out", "small"],
    "own_criterion": [],
    "own_loop": ["--epochs", "5"],
    "prune_trained": ["--epochs", "2"],
    "run_study": ["--epochs", "1", "--seeds", "1", "--out", "runs/short"],
    "two_processes": ["--epochs", "1"],
}


@pytest.fixture
def run(tmp_path, monkeypatch, capsys):
    """Run an example here, in a folder of its own, without leaving traces in the registers."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_REGISTER", dict(registry._REGISTER))
    monkeypatch.setattr(rules, "_RULES", dict(rules._RULES))

    def run(name: str) -> str:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *SETTINGS[name]])
        with torch.random.fork_rng():
            runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
        return capsys.readouterr().out

    return run


def test_every_example_is_short_and_is_run_here():
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(SETTINGS)
    for path in EXAMPLES.glob("*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) < 60, path.name


def test_own_loop(run):
    said = run("own_loop")
    assert re.search(r"epoch   5  loss [\d.]+  weights that matter [\d.]+%", said)
    dense = float(re.search(r"test accuracy ([\d.]+)% dense", said)[1])
    assert dense > 90


def test_prune_trained(run):
    rows = dict(re.findall(r"^(\S.*?)  +[\d.]+%  sparsity ([\d.]+)$", run("prune_trained"), re.MULTILINE))
    assert rows["80 % of all weights"] == rows["80 % of each layer"] == "0.800"
    assert 0.48 < float(rows["two of each four"]) <= 0.5  # the first kernel has one input and keeps all


def test_make_smaller(run, tmp_path):
    said = run("make_smaller")
    assert "the same outputs after loading: True" in said
    masked, compact = re.search(r"test accuracy ([\d.]+)% masked, ([\d.]+)% compact", said).groups()
    assert masked == compact
    assert float(re.search(r"FLOPs per sample .*÷ ([\d.]+)", said)[1]) > 3
    assert (tmp_path / "small").is_dir()


def test_choose_prior(run):
    rows = {line.split()[0]: line.split()[1:] for line in run("choose_prior").splitlines()[1:]}
    assert list(rows) == ["scalar", "layer", "unit", "parameter", "by_filter"]
    assert (rows["scalar"][0], rows["parameter"][0]) == ("1", "22954")
    assert rows["by_filter"][0] == str(16 + 32 + 32 + 7)  # filters, three biases, two linear layers with theirs


def test_own_criterion(run):
    said = run("own_criterion")
    assert re.search(r"1\.gain +8 +gain", said)  # the rule held against autograd
    assert "achieved 0.5000" in said


def test_run_study(run):
    said = run("run_study")
    assert "failed" not in said
    assert {"map", "spam", "opd", "magnitude"} <= set(said.split())


def test_language_model(run):
    pytest.importorskip("transformers")
    said = run("language_model")
    assert re.findall(r"^(dense|compact|90 %)", said, re.MULTILINE) == ["dense", "compact", "90 %"]


def test_two_processes():
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2"]
    done = subprocess.run(
        [*command, str(EXAMPLES / "two_processes.py"), *SETTINGS["two_processes"]],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.count("same masks as rank 0: True") == 2
    assert len(set(re.findall(r"accuracy ([\d.]+)%", done.stdout))) == 1
