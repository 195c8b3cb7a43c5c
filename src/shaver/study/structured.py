"""A trained network made smaller: whole units removed by every criterion, compacted and measured."""

import time
from collections.abc import Collection, Iterator

from torch import nn

from shaver.criteria import needs
from shaver.data import Splits
from shaver.structure import find_groups, score_units
from shaver.structure.choosing import Chooser, Choosing
from shaver.structure.compaction import remove_units
from shaver.study.evaluation import dense_row, fine_tune, measured
from shaver.study.grid import Cell
from shaver.study.store import Report, Trained, scored_batches
from shaver.study.sweep import DENSE, Row


def evaluate_structured(
    cell: Cell, trained: Trained, data: Splits, *, skip: Collection[str] = (), report: Report
) -> Iterator[list[Row]]:
    """Yield the dense network's row, then each criterion's: the same share of units goes from each layer.

    ``sparsity`` and ``achieved`` are shares of units. The arguments are those of
    :func:`shaver.study.evaluation.evaluate`.
    """
    stage, model = cell.stage, trained.model
    example = data.test[:2][0]
    groups = find_groups(model, example)
    chooser = Chooser(model, groups, Choosing(), example)
    if DENSE not in skip:
        report("measuring the dense network", 0, len(stage.criteria))
        yield [dense_row(trained, data)]
    for number, criterion in enumerate(stage.criteria):
        if criterion in skip:
            continue
        report(f"compacting by {criterion}", number, len(stage.criteria))
        began = time.perf_counter()
        batches, seed = scored_batches(data), cell.training.fit["seed"]
        scores = score_units(model, groups, criterion, posterior=trained.posterior, batches=batches, seed=seed)
        seconds = time.perf_counter() - began
        if "posterior" in needs(criterion):
            seconds += trained.facts["posterior_seconds"]
        rows = []
        for sparsity in stage.sparsities:
            chosen = chooser.choose(scores, sparsity)
            small: nn.Module = remove_units(model, groups, chosen.kept, example).model
            row: Row = {"criterion": criterion, "sparsity": sparsity, "achieved": chosen.achieved}
            row["score_seconds"] = seconds
            if stage.epochs:
                row["tuning_epochs"] = stage.epochs
                fine_tune(cell, small, data)
            rows.append(row | measured(small, data, timed=True))
        yield rows
