"""A trained network, pruned and measured: one row for each criterion and sparsity."""

import math
import time
from collections.abc import Collection, Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from shaver.criteria import needs
from shaver.data import Splits
from shaver.lab.recipes.grid import Cell
from shaver.lab.recipes.language import Reviews, after_the_fact
from shaver.lab.run.cutting import Cut, Units, Weights
from shaver.lab.run.store import Report, Trained, scored_batches
from shaver.lab.run.sweep import DENSE, Row
from shaver.measure import cost, latency, quality
from shaver.training import Options, fit

#: Samples of a call whose latency is measured; of texts, one.
LATENCY_BATCH = 128


def evaluate(
    cell: Cell, trained: Trained, data: Splits, *, skip: Collection[str] = (), report: Report
) -> Iterator[list[Row]]:
    """Yield rows as they are measured: the dense network's, then each criterion's.

    Args:
        cell: Which stage, criteria and sparsities.
        trained: The network.
        data: Its data.
        skip: Criteria whose rows exist already, ``"dense"`` among them.
        report: Told before each criterion.
    """
    stage = cell.stage
    if stage.name == "online":
        if not skip:
            yield [_online_row(cell, trained, data)]
        return
    if stage.name == "two-steps":
        trained = _after_two_steps(cell, trained, data)
    cutter = Units(trained, data) if stage.name == "structured" else Weights(trained)
    if DENSE not in skip:
        report("measuring the dense network", 0, len(stage.criteria))
        yield [_dense_row(trained, data)]
    for number, criterion in enumerate(stage.criteria):
        if criterion in skip:
            continue
        report(f"{cutter.verb} by {criterion}", number, len(stage.criteria))
        began = time.perf_counter()
        scores = cutter.score(criterion, batches=scored_batches(data), seed=cell.training.fit["seed"])
        seconds = time.perf_counter() - began
        if "posterior" in needs(criterion):  # where only scoring needed the curvature
            seconds += trained.facts["posterior_seconds"]
        rows = []
        for sparsity in stage.sparsities:
            cut = cutter.cut(scores, sparsity)
            row: Row = {"criterion": criterion, "sparsity": sparsity, "achieved": cut.achieved}
            row["score_seconds"] = seconds
            if stage.epochs:
                row["tuning_epochs"] = stage.epochs
                _fine_tune(cell, cut, data)
            elif cut.evidence_change is not None:
                row["log_evidence"] = _log_evidence(trained) + cut.evidence_change
            rows.append(row | _measured(cut.network, data, timed=cutter.faster))
        yield rows


def _dense_row(trained: Trained, data: Splits) -> Row:
    """The network before pruning, with its latency."""
    row: Row = {"criterion": DENSE, "sparsity": 0.0, "achieved": 0.0, "log_evidence": _log_evidence(trained)}
    return row | _measured(trained.model, data, timed=True)


def _fine_tune(cell: Cell, cut: Cut, data: Splits) -> None:
    """Train on under the prior of MAP at a tenth of the learning rate, the zeros held."""
    options = {name: cell.training.fit[name] for name in ("optimizer", "batch_size", "seed")}
    decay = Options(weight_decay=cell.training.temperature / len(data.train))
    lr, epochs = cell.training.fit["lr"] / 10, cell.stage.epochs
    fit(cut.network, data.train, method="map", epochs=epochs, lr=lr, masks=cut.masks, options=decay, **options)


def _measured(network: nn.Module, data: Splits, *, timed: bool = False) -> Row:
    """Quality on the test data and cost.

    ``bytes`` are those of the smallest way to store the network, ``flops`` those that it executes: masked weights are
    stored for nothing and multiplied all the same. ``flops_sparse`` counts the multiplications with non-zero weights.
    """
    texts = isinstance(data, Reviews)
    found = quality(network, data.test.batches(64 if texts else 1000)).as_dict()
    example = data.test[:1][0]
    costs = cost(network, example, latency=False)
    row: Row = {name: found[name] for name in ("accuracy", "nll", "ece", "brier")}
    row |= {"nonzeros": costs.nonzeros, "parameters": costs.parameters, "bytes": costs.bytes_sparse}
    row |= {"flops": costs.flops, "bytes_dense": costs.bytes_dense, "flops_sparse": costs.flops_sparse}
    if timed:
        size = 1 if texts else LATENCY_BATCH
        row["latency_ms"] = 1000 * latency(network, example, batch_size=size, seconds=2.0).median
    return row


def _log_evidence(trained: Trained) -> float:
    """Of the dense network; NaN without the likelihood of the data, and for L1, whose prior is no Gaussian."""
    if "l1" in trained.facts or not math.isfinite(trained.posterior.curvature.log_likelihood):
        return math.nan
    return trained.posterior.log_evidence


def _after_two_steps(cell: Cell, trained: Trained, data: Splits) -> Trained:
    """The same network with the posterior that SpaM learns from it afterwards."""
    began = time.perf_counter()
    options = cell.training.fit
    posterior = after_the_fact(trained.model, data.train, batch_size=options["batch_size"], seed=options["seed"])
    facts = trained.facts | {"posterior_seconds": time.perf_counter() - began}
    return replace(trained, posterior=posterior, facts=facts)


def _online_row(cell: Cell, trained: Trained, data: Splits) -> Row:
    criterion = "opd" if cell.training.labels["method"] == "spam" else "magnitude"
    row: dict[str, Any] = {"criterion": criterion, "sparsity": cell.training.online}
    row |= {"achieved": trained.facts["online"], "score_seconds": 0.0}
    return row | _measured(trained.model, data)
