"""A run folder for the report: small networks that were really trained, pruned and measured."""

import json

import pytest
import torch

import shaver
from shaver.lab.report.tables import write_rows
from shaver.lab.run.results import COLUMNS
from shaver.lab.run.sweep import sweep

SPARSITIES = (0.5, 0.9, 0.95, 0.99)
CRITERIA = ("opd", "magnitude", "grasp", "random")
TRAININGS = (
    ("map", "", ""),
    ("spam", "parameter", "diag"),
    ("spam", "layer", "diag"),
)


def write_run(folder, recipe="toy", scale="cpu", seeds=(0, 1)):
    """Two epochs of a tiny network on part of the breast cancer data; a run folder as ``shaver run`` writes it."""
    rows, cells = [], []
    for seed in seeds:
        data = shaver.data.load("cancer", seed=seed)
        for method, prior, structure in TRAININGS:
            model = shaver.zoo.build("fcn", inputs=30, hidden=[8], classes=2, seed=seed)
            spam = {"prior": prior, "structure": structure} if method == "spam" else None
            history = shaver.fit(model, data.train, method=method, epochs=2, batch_size=64, lr=0.1, seed=seed,
                                 **({"spam": spam} if spam else {}))  # fmt: skip
            batches, test = data.train.batches(256), list(data.test.batches(256))
            posterior = history.posterior or shaver.Posterior(
                shaver.curvature.estimate(model, batches), 1.0, dict(model.named_parameters())
            )
            labels = {"method": method, "prior": prior, "structure": structure, "source": "mc" if prior else "",
                      "seed": seed}  # fmt: skip
            common = {"recipe": recipe, "scale": scale, "task": "fcn-cancer", "network": "fcn", "data": "cancer",
                      "stage": "posthoc", "train_seconds": sum(history.column("seconds")), "epochs": 2, "code": "0",
                      **labels}  # fmt: skip
            for part in sweep(model, test, criteria=CRITERIA, sparsities=SPARSITIES, posterior=posterior,
                              batches=batches, example=test[0][0][:1], seed=seed):  # fmt: skip
                rows += [common | row | {"bytes": row["bytes_sparse"]} for row in part]
            cell = folder / "cells" / f"{method}-{prior}-{seed}"
            cell.mkdir(parents=True)
            config = {"task": "fcn-cancer", "training": {"labels": labels, "online": None}}
            (cell / "config.json").write_text(json.dumps(config))
            history.to_csv(cell / "history.csv")
            cells.append(cell.name)
    write_rows(folder / "results.csv", [{name: row.get(name, "") for name in COLUMNS} for row in rows])
    task = {"name": "fcn-cancer", "title": "Tiny FCN on breast cancer", "note": "2 epochs, 8 units"}
    study = {
        "recipe": {"name": recipe, "title": "A toy", "scale": scale, "tasks": [task]}, "cells": cells,
        "command": ["/somewhere/bin/shaver", "run", "toy", "--note", "a b"], "versions": {"torch": torch.__version__},
        "machine": {"platform": "Testos", "cores": 2, "host": "secret-host"},
    }  # fmt: skip
    (folder / "study.json").write_text(json.dumps(study))
    return folder


@pytest.fixture(scope="session")
def toy_run(tmp_path_factory):
    """The folder; tests must not change it."""
    return write_run(tmp_path_factory.mktemp("toy"))
