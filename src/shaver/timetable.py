"""When SpaM measures curvature and when it updates δ: burn-in, pace, pauses after harm, freeze, release."""

import warnings
from collections.abc import Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from shaver.settings import USUAL, Settings
from shaver.watch import WINDOW, Watch

#: Steps between curvature measurements are multiplied by this while δ is frozen. If the number of steps is known, they
#: are multiplied by its square while neither an update of δ nor the end of training is near.
IDLE = 4
#: Updates of δ that a short training should have.
UPDATES = 40
#: Share of a training after which the loss usually has settled.
USUAL_START = 0.1
#: When δ is learned even if the loss has not settled: after this share of the time before the freeze or, if the length
#: is unknown, after this many measured losses. The loss of weights that were trained before may not fall at all.
LATEST, PATIENCE = 4 / 7, 100
#: A learning rate is low if it is at most this share of its highest value.
LOW = 0.5


class Timetable:
    """Counts the steps and epochs of a training and says what is due.

    Args:
        settings: SpaM's settings.
        total_steps: Number of steps of the whole training, or None.
        watch: Decides whether the loss has settled, so that δ may be learned.
        per_weight: Each weight has its own δ.

    Attributes:
        steps: Number of steps so far.
        epochs: Number of epochs so far.
        every: Steps between two curvature measurements, while δ is learned.
        update: Steps between two updates of δ.
    """

    def __init__(self, settings: Settings, total_steps: int | None, watch: Watch, *, per_weight: bool) -> None:
        self.steps, self.epochs, self.total_steps = 0, 0, total_steps
        self._settings, self._watch = settings, watch
        self.every, self.update = pace(settings, total_steps, per_weight=per_weight) if settings.online else (1, 1)
        self._is_stopped = False
        self._rates: dict[str, tuple[float, float]] = {}
        self._latest = LATEST * settings.learned_until
        is_short = self._latest * (total_steps or 0) < 4 * WINDOW * self.every  # too short to see whether it settles
        if is_short or not per_weight:  # a δ that many weights share is learned slowly
            self._latest = _usual_start(settings)

    def freeze(self) -> None:
        """Stop updating δ."""
        self._is_stopped = True

    @property
    def is_frozen(self) -> bool:
        """Whether δ no longer changes."""
        known = self.total_steps is not None and self.steps > self._settings.learned_until * self.total_steps
        return self._is_stopped or known

    @property
    def has_begun(self) -> bool:
        """Whether δ may be learned: after the burn-in, or once the loss has settled."""
        total, share, watch = self.total_steps, self._settings.burn_in, self._watch
        if share == 0:
            return True
        if total is None:
            return watch.has_settled or not 0 < watch.recorded < PATIENCE
        if share is not None:
            return self.steps > share * total
        return watch.has_settled or self.steps > self._latest * total

    @property
    def is_due(self) -> bool:
        """Whether δ is updated after this step."""
        return not self.steps % self.update and self.has_begun and not self.is_frozen

    def note_rates(self, optimizer: Optimizer, names: Mapping[Tensor, str]) -> None:
        """Note the newest and the highest learning rate of each group of parameters, by its first parameter's name."""
        for group in optimizer.param_groups:
            if name := next((names[p] for p in group["params"] if p in names), None):
                rate = float(group["lr"])
                self._rates[name] = rate, max(rate, self._rates.get(name, (0.0, 0.0))[1])

    @property
    def releases(self) -> bool:
        """Whether the weights leave the learned prior: δ is frozen and, without ``debias=True``, all rates are low.

        δ damps the steps of the weights that it has removed. Without it, a step size that was stable may not be.
        """
        if self._settings.debias is False or not self.is_frozen:
            return False
        return self._settings.debias is True or all(rate <= LOW * highest for rate, highest in self._rates.values())

    @property
    def is_epoch_due(self) -> bool:
        """By epochs: whether δ is updated after this epoch. ``burn_in`` and ``frequency`` count epochs."""
        after = self.epochs - int(self._settings.burn_in or 0) - 1
        return after >= 0 and not after % self._settings.frequency and not self.is_frozen

    def skips(self) -> bool:
        """Whether to skip the update that is due, because learning δ did harm. Counts it as skipped."""
        is_skipped = self._watch.skipped > 0
        self._watch.skipped -= is_skipped
        return is_skipped

    @property
    def spacing(self) -> int:
        """Steps between curvature measurements: ``every``, but more between the freeze and the last steps.

        Also more before ``burn_in``, if it was given.
        """
        if self.total_steps is None:
            return self.every * (IDLE if self.is_frozen else 1)
        reach = self.every / (1 - self._settings.decay)  # as far back as the average of H reaches
        begins = (self._settings.burn_in or 0.0) * self.total_steps
        is_near = self.steps >= begins - reach and not self.is_frozen
        is_last = self.total_steps - 2 * reach <= self.steps < self.total_steps
        return self.every * (1 if is_near or is_last else IDLE**2 if self.steps < self.total_steps else IDLE)

    def state(self) -> dict[str, Any]:
        """Everything needed to resume."""
        return {"steps": self.steps, "epochs": self.epochs, "is_frozen": self._is_stopped, "rates": dict(self._rates)}

    def load_state(self, state: dict[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.steps, self.epochs, self._is_stopped = state["steps"], state["epochs"], state["is_frozen"]
        self._rates = {name: (rate, highest) for name, (rate, highest) in state["rates"].items()}


def pace(settings: Settings, total_steps: int | None, *, per_weight: bool = True) -> tuple[int, int]:
    """``every`` and ``update`` for a training of ``total_steps``. Warns if δ would never be updated.

    Args:
        settings: SpaM's settings.
        total_steps: Number of steps, or None.
        per_weight: Each weight has its own δ. A δ that many weights share needs fewer updates: 40 updates cost a
            network with the unit prior one point of accuracy.
    """
    update = settings.update or USUAL
    begins = _usual_start(settings) if settings.burn_in is None else settings.burn_in
    if settings.update is None and total_steps is not None:
        span = (settings.learned_until - begins) * total_steps
        shortest = max(int(span / UPDATES), min(5, int(span / 5)), 1) if per_weight else max(int(span / 5), 1)
        update = min(update, shortest)
    if total_steps is not None and int(settings.learned_until * total_steps / update) * update <= begins * total_steps:
        warnings.warn(
            f"δ will not be updated in {total_steps} steps with update={update}, burn_in={begins:g} and "
            f"freeze={settings.learned_until:g}, so SpaM has no effect; leave update= out, or train longer.",
            stacklevel=4,
        )
    return settings.every or max(1, min(15 if per_weight else 10, update // 3)), update


def _usual_start(settings: Settings) -> float:
    """The share of a training after which δ is usually learned."""
    return min(USUAL_START, settings.learned_until / 2)
