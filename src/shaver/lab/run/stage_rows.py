"""The rows of a stage: a trained network, pruned and measured, one row for each criterion and sparsity."""

import copy
import math
import time
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from shaver.batches import IGNORED
from shaver.criteria import needs, score
from shaver.data import Splits
from shaver.evidence import Posterior
from shaver.lab.recipes.grid import Cell
from shaver.lab.recipes.language import Reviews, after_the_fact
from shaver.lab.run.networks import CachedNetwork, Report, scored_batches
from shaver.lab.run.results import DENSE, Row
from shaver.measure import summary
from shaver.pruning import Masks, prune
from shaver.structure import ChoiceOptions, Chooser, find_groups, remove_units, score_units
from shaver.training import Options, fit

#: Samples of the call whose latency is measured; one for language models.
LATENCY_BATCH = 128
#: Training samples that a repair sees, without their labels.
CALIBRATION = 256
Scores = Mapping[str, Tensor]


@dataclass(frozen=True)
class Cut:
    """A copy of a network from which weights or units were removed."""

    network: nn.Module
    achieved: float  # the share that was removed
    masks: Masks | None = None  # what has to stay zero when the copy is trained further, if anything
    evidence_change: float | None = None  # the change of the log evidence, where it is known


class WeightCutter:
    """Sets single weights to zero; with ``calibration``, the remaining weights are repaired."""

    verb, is_faster = "pruning", False

    def __init__(self, trained: CachedNetwork, calibration: list[Tensor] | None = None) -> None:
        self.trained, self.calibration = trained, calibration

    def score(self, criterion: str, **given: Any) -> Scores:
        """A score per weight."""
        return score(self.trained.model, criterion, posterior=self.trained.posterior, **given)

    def cut(self, scores: Scores, sparsity: float) -> Cut:
        """The network without this share of its weights."""
        network = copy.deepcopy(self.trained.model)
        pruned = prune(network, scores, sparsity, posterior=self.trained.posterior, calibration=self.calibration)
        change = None if self.calibration else pruned.evidence_change  # a repair changes it further
        return Cut(network, pruned.achieved, pruned.masks, change)


class UnitCutter:
    """Removes the same share of units from each layer, and compacts the network."""

    verb, is_faster = "compacting", True

    def __init__(self, trained: CachedNetwork, data: Splits) -> None:
        self.trained, self.example = trained, data.test[:2][0]
        self.groups = find_groups(trained.model, self.example)
        self.chooser = Chooser(trained.model, self.groups, ChoiceOptions(), self.example)

    def score(self, criterion: str, **given: Any) -> Scores:
        """A score per unit."""
        return score_units(self.trained.model, self.groups, criterion, posterior=self.trained.posterior, **given)

    def cut(self, scores: Scores, sparsity: float) -> Cut:
        """The network without this share of its units."""
        chosen = self.chooser.choose(scores, sparsity)
        done = remove_units(self.trained.model, self.groups, chosen.kept, self.example)
        return Cut(done.model, chosen.achieved)


def evaluate(
    cell: Cell, trained: CachedNetwork, data: Splits, *, skip: Collection[str] = (), report: Report
) -> Iterator[list[Row]]:
    """Yield rows as they are measured: the dense network's, then each criterion's, without those in ``skip``."""
    stage = cell.stage
    if stage.name == "online":
        if not skip:
            yield [_online_row(cell, trained, data)]
        return
    if stage.name == "two-steps":
        trained = _after_two_steps(cell, trained, data)
    calibration = [data.train[:CALIBRATION][0]] if stage.name == "repaired" else None
    cutter = UnitCutter(trained, data) if stage.name == "structured" else WeightCutter(trained, calibration)
    if DENSE not in skip:
        report("measuring the dense network", 0, len(stage.criteria))
        yield [_dense_row(cell, trained, data)]
    for number, criterion in enumerate(stage.criteria):
        if criterion in skip:
            continue
        report(f"{cutter.verb} by {criterion}", number, len(stage.criteria))
        began = time.perf_counter()
        scores = cutter.score(criterion, batches=scored_batches(data), seed=cell.training.fit["seed"])
        seconds = time.perf_counter() - began
        if "posterior" in needs(criterion):  # an estimate after training serves the scores alone
            seconds += trained.facts["posterior_seconds"]
        rows = []
        for sparsity in stage.sparsities:
            cut = cutter.cut(scores, sparsity)
            row: Row = {"criterion": criterion, "sparsity": sparsity, "achieved": cut.achieved}
            row["score_seconds"] = seconds
            if stage.epochs:
                row["tuning_epochs"] = stage.epochs
                _fine_tune(cell, cut, data)
            elif cut.evidence_change is not None and trained.posterior.temperature == cell.training.temperature:
                row["log_evidence"] = _log_evidence(cell, trained) + cut.evidence_change
            rows.append(row | measured(cut.network, data, timed=cutter.is_faster))
        yield rows


def is_better_than_guessing(accuracy: float, targets: Tensor) -> bool:
    """Whether an accuracy is above that of always answering the most frequent class, by two standard errors."""
    counts = torch.unique(targets[targets != IGNORED], return_counts=True)[1].double()
    chance, samples = float(counts.max() / counts.sum()), float(counts.sum())
    return accuracy > chance + 2 * math.sqrt(chance * (1 - chance) / samples)


def measured(network: nn.Module, data: Splits, *, timed: bool = False) -> Row:
    """Quality on the test data and cost, as columns of the results.

    ``bytes`` counts the smallest way to store the network; ``flops`` counts the operations that it executes, those
    with removed weights included; ``flops_sparse`` counts the operations with non-zero weights.
    """
    batch, timed_batch = (64, 1) if isinstance(data, Reviews) else (1000, LATENCY_BATCH)
    latencies = (timed_batch,) if timed else ()
    row: Row = summary(network, data.test.batches(batch), data.test[:1][0], latencies=latencies, seconds=2.0)
    row["bytes"] = row.pop("bytes_sparse")
    for size in latencies:
        row["latency_ms"] = 1000 * row.pop(f"latency_{size}")
    return row


def _dense_row(cell: Cell, trained: CachedNetwork, data: Splits) -> Row:
    """The network before pruning, with its latency."""
    row: Row = {"criterion": DENSE, "sparsity": 0.0, "achieved": 0.0, "log_evidence": _log_evidence(cell, trained)}
    return row | measured(trained.model, data, timed=True)


def _online_row(cell: Cell, trained: CachedNetwork, data: Splits) -> Row:
    criterion = "opd" if cell.training.labels["method"] == "spam" else "magnitude"
    asked = cell.training.online  # rivals find their own
    row: Row = {"criterion": criterion, "sparsity": trained.facts["online"] if asked is None else asked}
    row |= {"achieved": trained.facts["online"], "score_seconds": 0.0}
    return row | measured(trained.model, data)


def _fine_tune(cell: Cell, cut: Cut, data: Splits) -> None:
    """Train further under the prior of MAP at a tenth of the learning rate, and keep the zeros."""
    options = {name: cell.training.fit[name] for name in ("optimizer", "batch_size", "seed")}
    decay = Options(weight_decay=cell.training.temperature / len(data.train))
    lr, epochs = cell.training.fit["lr"] / 10, cell.stage.epochs
    fit(cut.network, data.train, method="map", epochs=epochs, lr=lr, masks=cut.masks, options=decay, **options)


def _log_evidence(cell: Cell, trained: CachedNetwork) -> float:
    """Of the dense network; NaN without the likelihood of the data, and for L1, whose prior is not a Gaussian.

    The data count as the task says, which need not be SpaM's own temperature, so that all trainings can be compared.
    """
    found = trained.posterior
    if "l1" in trained.facts or not math.isfinite(found.curvature.log_likelihood):
        return math.nan
    return Posterior(found.curvature, found.delta(), found.theta, cell.training.temperature).log_evidence


def _after_two_steps(cell: Cell, trained: CachedNetwork, data: Splits) -> CachedNetwork:
    """The same network with the posterior that SpaM learns from it afterwards."""
    began = time.perf_counter()
    options = cell.training.fit
    posterior = after_the_fact(trained.model, data.train, batch_size=options["batch_size"], seed=options["seed"])
    facts = trained.facts | {"posterior_seconds": time.perf_counter() - began}
    return replace(trained, posterior=posterior, facts=facts)
