"""A run folder for the report: small networks that were really trained, pruned and measured."""

import contextlib
import json

import pytest
import torch

from shaver.lab import run_study
from shaver.lab.recipes.recipe import Recipe, Stage, Task
from shaver.lab.run.cell import run_cell

SPARSITIES = (0.5, 0.9, 0.95, 0.99)
CRITERIA = ("opd", "magnitude", "grasp", "random")
TINY = {"name": "fcn", "inputs": 30, "hidden": [8], "classes": 2}


class InProcess:
    """Runs each cell in this process, and keeps a list; stands for any engine."""

    slots = 1

    def __init__(self, slots=1):
        self.started = []

    def start(self, folder, store, any_code):
        self.started.append(folder.name)
        with contextlib.suppress(Exception):  # it is in the cell's files
            run_cell(str(folder), str(store), any_code)
        return Ended()

    def close(self):
        pass


class Ended:
    def poll(self):
        return ""

    def stop(self):
        raise AssertionError("a cell that is over is not stopped")


def write_run(folder, recipe="toy", scale="cpu", seeds=2):
    """Two epochs of a tiny network on the breast cancer data, as ``shaver run`` leaves them."""
    task = Task("fcn-cancer", "Tiny FCN on breast cancer", scale, "2 epochs, 8 units", TINY, "cancer", epochs=2,
                batch_size=64, lr=0.1)  # fmt: skip
    toy = Recipe(recipe, "A toy", "nothing", scale, (task,), priors=("parameter", "layer"), seeds=seeds,
                 stages=(Stage(criteria=CRITERIA, sparsities=SPARSITIES),), curves=False)  # fmt: skip
    assert run_study(toy, folder, engine=InProcess()).failed == {}
    study = json.loads((folder / "study.json").read_text())
    study |= {
        "command": "shaver run toy --note 'a b'",
        "versions": {"torch": torch.__version__},
        "machine": {"platform": "Testos", "cores": 2, "host": "secret-host"},
    }
    (folder / "study.json").write_text(json.dumps(study))
    return folder


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory):
    """The folder; tests must not change it."""
    return write_run(tmp_path_factory.mktemp("toy") / "toy-cpu")
