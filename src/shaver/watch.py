"""Watches a training: when its loss has settled enough to learn δ, and whether learning δ does harm."""

import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

from torch import Tensor

from shaver.curvature.blocks import summed
from shaver.priors import Prior

#: Measured losses per window. Two windows are compared.
WINDOW = 5
#: A rise counts if it exceeds this many standard errors and this share of the loss. Before δ is learned, the loss must
#: have fallen by this share.
ERRORS, SHARE = 4.0, 0.1
#: The loss has settled when the last quarter of the training so far brought at most this share of the whole fall.
LATELY = 0.1
#: The evidence counts as falling after this many falls in a row that add up to this many nats per sample.
FALLS, NATS = 5, 0.05
#: Updates of δ that are skipped after the first sign of harm. Every further sign doubles the number.
PAUSE = 5


class Watch:
    """Compares the newest measured losses with those before them, and follows the evidence.

    Args:
        data_size: Number of training samples.

    Attributes:
        has_settled: Whether δ may be learned: the loss has fallen by a tenth and by more than the variation between
            batches, and at most a tenth of this fall came in the last quarter of the training so far. That quarter is
            compared with the one before it; a standard error of the difference counts as fall.
        recorded: Number of losses so far.
        skipped: Updates of δ that are still to be skipped.
        signs: How often the loss or the evidence became worse.
    """

    def __init__(self, data_size: int) -> None:
        self._data_size = data_size
        self._losses: list[float] = []
        self._all: list[float] = []  # until the loss has settled
        self._evidence: list[float] = []
        self._kept: set[str] = set()
        self._emptied: set[str] = set()
        self.has_settled = False
        self.recorded = self.skipped = self.signs = 0

    def record(self, loss: float) -> None:
        """Add the mean negative log likelihood of a measured batch."""
        if not math.isfinite(loss):
            return
        self.recorded += 1
        self._losses = [*self._losses, loss][-2 * WINDOW :]
        if not self.has_settled:
            self._all.append(loss)
            self.has_settled = self._settles()
            if self.has_settled:
                self._all = []

    def _settles(self) -> bool:
        quarter = len(self._all) // 4
        if quarter < WINDOW:
            return False
        first = statistics.fmean(self._all[:WINDOW])
        lately, noise = _fall(self._all[-2 * quarter : -quarter], self._all[-quarter:])
        fall = first - statistics.fmean(self._all[-quarter:])
        return fall > max(noise, SHARE * abs(first)) and lately + noise * math.sqrt(2 / quarter) < LATELY * fall

    def harm(self, log_evidence: float) -> str | None:
        """Call after an update of δ. Returns a message if loss or evidence got worse, else None. Sets ``skipped``."""
        if math.isfinite(log_evidence):
            self._evidence = [*self._evidence, log_evidence][-FALLS - 1 :]
        found = self._risen() or self._fallen()
        if found is None:
            return None
        self._losses, self._evidence = [], []  # start the comparison again
        self.skipped = PAUSE * 2**self.signs
        self.signs += 1
        return found

    def _risen(self) -> str | None:
        if len(self._losses) < 2 * WINDOW:
            return None
        fall, noise = _fall(self._losses[:WINDOW], self._losses[WINDOW:])
        before, now = statistics.fmean(self._losses[:WINDOW]), statistics.fmean(self._losses[WINDOW:])
        if -fall > ERRORS * noise * math.sqrt(2 / WINDOW) and -fall > SHARE * abs(before):
            return f"the training loss rose from {before:.4g} to {now:.4g}"
        return None

    def _fallen(self) -> str | None:
        values = self._evidence
        falls = all(later < earlier for earlier, later in pairwise(values))
        if len(values) > FALLS and falls and values[0] - values[-1] > NATS * self._data_size:
            return f"the log evidence fell from {values[0]:,.0f} to {values[-1]:,.0f} over {FALLS} updates"
        return None

    def warn_of_harm(self, log_evidence: float, step: int) -> None:
        """Skip the next updates of δ if :meth:`harm` finds harm, and warn the second time."""
        harm = self.harm(log_evidence)
        if harm is not None and self.signs == 2:
            warnings.warn(
                f"{harm} while δ was learned, for the second time (step {step}). SpaM skips the next {self.skipped} "
                "updates of δ. If this goes on, lower the learning rate, or the temperature, so that the data count "
                "more against the prior.",
                stacklevel=6,
            )

    def keep_matrices(
        self,
        prior: Prior,
        before: Prior,
        diagonal: Mapping[str, Tensor],
        temperature: float,
        total: Callable[..., list[float]],
        step: int,
    ) -> None:
        """Undo the update of δ for matrices that it would remove, and warn (:func:`restore_vanishing`)."""
        for name, (had, left) in restore_vanishing(prior, before, diagonal, temperature, total).items():
            if had >= 1 and name not in self._kept:
                self._kept.add(name)
                warnings.warn(
                    f"learning δ would remove every weight of {name!r}: at step {step} its effective number of "
                    f"weights would fall from {had:.3g} to {left:.2g}. SpaM keeps the δ that it has. If the layer "
                    "matters, lower the learning rate or the temperature, or pass shrink=0.",
                    stacklevel=6,
                )

    def warn_of_empty_matrices(self, weights: Mapping[str, Tensor], step: int) -> None:
        """Warn once when a whole weight matrix has become zero, because the layer then has no effect."""
        empty = [n for n, w in weights.items() if w.ndim > 1 and w.numel() and n not in self._emptied and not w.any()]
        if empty:
            self._emptied.update(empty)
            warnings.warn(
                f"every weight of {', '.join(map(repr, empty))} is zero after step {step}, so the layer has no "
                "effect. The learning rate is too high for the prior, or the data set too small: lower the learning "
                "rate, or pass shrink=0.",
                stacklevel=6,
            )

    def state(self) -> dict[str, Any]:
        """Everything needed to resume."""
        fixed = ("_data_size", "_kept", "_emptied")
        return {name: value for name, value in vars(self).items() if name not in fixed}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        vars(self).update(state)


def _fall(before: Sequence[float], now: Sequence[float]) -> tuple[float, float]:
    """The fall of the mean loss, and the standard deviation between batches."""
    noise = math.sqrt((statistics.variance(before) + statistics.variance(now)) / 2)
    return statistics.fmean(before) - statistics.fmean(now), noise


def restore_vanishing(
    prior: Prior,
    before: Prior,
    diagonal: Mapping[str, Tensor],
    temperature: float,
    total: Callable[..., list[float]],
) -> dict[str, tuple[float, float]]:
    """Undo an update of δ for each weight matrix that it would leave with less than one effective weight, Σγ < 1.

    A layer without effect cuts the network in two, and its weights get no gradient that could restore them.

    Args:
        prior: The prior after the update; changed in place.
        before: A snapshot from before the update.
        diagonal: Diagonal of H of each weight matrix.
        temperature: T: H counts 1/T times.
        total: Sums values over the ranks that hold rows of the matrices.

    Returns:
        Matrix → Σγ before and after the update, for those whose δ was restored.
    """

    def effective(of: Prior, name: str) -> float:
        return float(summed(lambda h, delta: h / (h + temperature * delta), diagonal[name], of.delta_of(name)))

    left = dict(zip(diagonal, total(*(effective(prior, name) for name in diagonal)), strict=True)) if diagonal else {}
    few = [name for name, count in left.items() if count < 1]
    if not few:
        return {}
    had = dict(zip(few, total(*(effective(before, name) for name in few)), strict=True))
    return {n: (had[n], left[n]) for n in few if had[n] > left[n] and prior.restore(n, before)}
