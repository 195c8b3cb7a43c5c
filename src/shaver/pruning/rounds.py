"""Pruning in rounds: remove some weights, repair the kept ones, rank again, until the target is reached.

Repaired weights differ from the trained ones, and so does their ranking. Ranking again after each repair helped more
than every other score that was tried (ResNet-20 on CIFAR-10, see the results page on repair).
"""

import copy
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from shaver.batches import Forward
from shaver.measure.evaluating import evaluating
from shaver.pruning.masks import Masks
from shaver.pruning.ranking import Ranking
from shaver.pruning.search import Quality
from shaver.repairing import Repaired, joint_fit, repair
from shaver.repairing.calibration import calibration_list
from shaver.repairing.joint import OutputError

#: A round keeps at least this share of the weights that the previous round kept.
SHARE = 0.7
#: When a repaired weight is ranked again, it counts as at most this many times its old size.
GROWTH = 10.0
#: Two choices of weights are compared on about this many batches.
COMPARED = 16


def levels(sparsity: float, share: float = SHARE) -> list[float]:
    """Sparsities up to the target. Each round keeps the same share, at least ``share``, of the weights kept before.

    Example:
        >>> [round(level, 3) for level in levels(0.8)]
        [0.275, 0.475, 0.619, 0.724, 0.8]
    """
    ratio = math.log(1 - sparsity)
    count = max(1, math.ceil(ratio / math.log(share) - 1e-9))
    return [*(1 - math.exp(ratio * k / count) for k in range(1, count)), sparsity]


class Rounds:
    """Prunes a network in rounds and repairs it after each. As a context manager, it undoes everything on an error.

    ``ranking`` is a function from scores to a ranking. The other arguments are those of :func:`shaver.prune`; the
    calibration batches are read once and kept in memory.
    """

    def __init__(
        self,
        model: nn.Module,
        calibration: Iterable[Any],
        ranking: Callable[[Mapping[str, Tensor]], Ranking] = Ranking,
        *,
        passes: int = 0,
        forward: Forward | None = None,
        progress: Callable[[int, int], None] | None = None,
    ) -> None:
        self.model = model
        self.data = calibration_list(calibration)
        self.reference = copy.deepcopy(model)
        self._ranking, self._forward, self._passes = ranking, forward, passes
        self._progress, self._round, self._rounds, self._layers = progress, 0, 1, 0
        self.report = Repaired()

    def __enter__(self) -> "Rounds":
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self.model.load_state_dict(self.reference.state_dict())

    def apply(self, masks: Masks, passes: int | None = None) -> None:
        """Apply the masks, and repair the kept weights; ``passes=None`` is all that were asked for."""
        passes = self._passes if passes is None else passes
        masks.apply_(self.model)

        def count(done: int, total: int) -> None:
            self._layers = total - passes
            self._count(self._round * self._layers + done)

        self.report = repair(
            self.model,
            self.data,
            reference=self.reference,
            masks=masks,
            passes=passes,
            forward=self._forward,
            progress=count,
        )

    def _count(self, done: int) -> None:
        if self._progress is not None:
            self._progress(done, self._rounds * self._layers + self._passes)

    def prune(self, scores: Mapping[str, Tensor], sparsity: float) -> Masks:
        """Prune to a sparsity in rounds, each ranked by the scores of the current weights.

        In the last round, the weights with the lowest given scores are tried too, and repaired once. Where the
        network's outputs are nearer to the dense ones with that choice, it is taken. After SpaM it often is: the scores
        know which weights training has made superfluous, and a repair can blur that.
        """
        found = levels(sparsity)
        self._rounds = len(found) + (len(found) > 1)
        masks = Masks({})
        for self._round, level in enumerate(found):
            masks = self.step(scores, level, masks, passes=0)
        if len(found) > 1:
            masks = self._nearer(masks, self._ranking(scores).at(sparsity))
        if self._passes and not all(bool(mask.all()) for mask in masks.values()):
            self._fit_together(masks)
        return masks

    def _nearer(self, masks: Masks, others: Masks) -> Masks:
        """Keep the repaired network as it is, or prune the dense one by other masks if its outputs are nearer then."""
        some = self.data[:: max(1, len(self.data) // COMPARED)]
        with evaluating(self.model, self.reference), torch.random.fork_rng(devices=[]):
            error = OutputError(self.reference, some, self._forward)
            reached = error.mean(self.model)
        before = self._snapshot()
        self.model.load_state_dict(self.reference.state_dict())
        self._round = self._rounds - 1
        self.apply(others, passes=0)
        with evaluating(self.model, self.reference), torch.random.fork_rng(devices=[]):
            if error.mean(self.model) < reached:
                return others
        self._return_to(before)
        return masks

    def _snapshot(self) -> tuple[dict[str, Any], Repaired]:
        return copy.deepcopy(self.model.state_dict()), self.report

    def _return_to(self, snapshot: tuple[dict[str, Any], Repaired]) -> None:
        state, self.report = snapshot
        self.model.load_state_dict(state)

    def _fit_together(self, masks: Masks) -> None:
        """Fit all layers together, from the weights that the repair found."""
        joint = joint_fit(
            self.model,
            self.data,
            reference=self.reference,
            passes=self._passes,
            masks=masks,
            forward=self._forward,
            progress=lambda done, _: self._count(self._rounds * self._layers + done),
        )
        self.report = replace(self.report, joint=joint)

    def step(
        self, scores: Mapping[str, Tensor], sparsity: float, removed: Masks, *, passes: int | None = None
    ) -> Masks:
        """One round. Removed weights stay removed."""
        present = rescored(scores, self.reference, self.model)
        for name, mask in removed.items():
            present[name] = present[name].masked_fill(~mask, -math.inf)
        masks = self._ranking(present).at(sparsity)
        self.apply(masks, passes)
        return masks

    def highest(
        self, scores: Mapping[str, Tensor], quality: Quality, *, max_drop: float, limit: float
    ) -> tuple[Masks, float, float]:
        """The highest sparsity up to ``limit`` whose repaired network loses at most ``max_drop`` of the quality.

        Rounds raise the sparsity until one loses too much. Four more rounds narrow the result down between that one and
        the last good one. Returns the masks, the quality before and the quality with them.
        """
        ranker = self._ranking(scores)
        highest = min(limit, ranker.limit, 1 - 1 / ranker.total)
        before = quality(self.model)
        good, best, reached = 0.0, ranker.removing(0), before
        bad: float | None = None
        for level in levels(highest):
            found = self._attempt(scores, level, best, quality, before - max_drop)
            if found is None:
                bad = level
                break
            good, (best, reached) = level, found
        for _ in range(4 if bad is not None else 0):
            assert bad is not None
            middle = 1 - math.sqrt((1 - good) * (1 - bad))
            found = self._attempt(scores, middle, best, quality, before - max_drop)
            if found is None:
                bad = middle
            else:
                good, (best, reached) = middle, found
        return best, before, reached

    def _attempt(
        self, scores: Mapping[str, Tensor], level: float, best: Masks, quality: Quality, lowest: float
    ) -> tuple[Masks, float] | None:
        """One round: its masks and the quality with them. None, with the model as it was, where that is too low."""
        before = self._snapshot()
        masks = self.step(scores, level, best)
        measured = quality(self.model)
        if measured >= lowest:
            return masks, measured
        self._return_to(before)
        return None


def rescored(scores: Mapping[str, Tensor], before: nn.Module, after: nn.Module) -> dict[str, Tensor]:
    """The scores after the weights have changed: each is multiplied by |new/old| to the power of its ``degree``.

    No weight counts as more than :data:`GROWTH` times its old size. SpaM shrinks weights to nothing and gives them an
    enormous precision. A repair moves them a little, and by that ratio they would outrank all others.
    """
    degree = getattr(scores, "degree", 1)
    old, new = dict(before.named_parameters()), dict(after.named_parameters())
    result = {}
    for name, values in scores.items():
        ratio = (new[name] / old[name]).detach().abs()
        ratio = torch.where(ratio.isfinite(), ratio, 1.0).clamp(max=GROWTH)
        result[name] = values * ratio.pow(degree).to(values)
    return result
