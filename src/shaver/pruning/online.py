"""Online pruning: masks that grow along a schedule while the network is trained."""

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shaver.naming import check_name
from shaver.pruning.hold import Hold
from shaver.pruning.masks import Masks
from shaver.pruning.pruned import Pruned, check_fit, report
from shaver.pruning.ranking import Ranking, check_sparsity

#: From the share of the pruning period that has passed to the share of the target sparsity, both in [0, 1].
Schedule = Callable[[float], float]


def linear(progress: float) -> float:
    """The same number of weights at each update, as in the paper."""
    return progress


def cubic(progress: float) -> float:
    """1 − (1 − t)³: most weights fall early, when the network still has time to adapt (Zhu and Gupta, 2017)."""
    return 1 - (1 - progress) ** 3


SCHEDULES: dict[str, Schedule] = {"linear": linear, "cubic": cubic}


class OnlinePruner:
    """Prunes during training; what has fallen never grows back, momentum and weight decay included.

    Example::

        pruner = OnlinePruner(model, optimizer, target=0.99)
        for epoch in range(epochs):
            train_one_epoch(model, optimizer)
            pruner.update(score(model, "opd", posterior=spam.posterior), progress=(epoch + 1) / epochs)

    Args:
        model: The network in training.
        optimizer: Its optimizer; the states of pruned weights are zeroed with them.
        target: The final sparsity, in [0, 1).
        schedule: ``"linear"``, ``"cubic"`` or a function from [0, 1] to [0, 1].
        start: The share of training at which pruning begins.
        end: The share at which the target is reached. Ending before training does leaves time to recover: LeNet at
            99 % is best with masks that are final at about 60 %.
        scope: ``"global"`` or ``"layer"``.
        cap: No parameter loses more than this share.
        minimum: Each parameter keeps at least so many weights.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: Optimizer | None,
        target: float,
        *,
        schedule: str | Schedule = "cubic",
        start: float = 0.0,
        end: float = 0.5,
        scope: str = "global",
        cap: float = 1.0,
        minimum: int = 0,
    ) -> None:
        self.target = check_sparsity(target)
        if not 0 <= start < end <= 1:
            raise ValueError(f"pruning runs from start to end with 0 ≤ start < end ≤ 1, not from {start} to {end}.")
        self._schedule = (
            SCHEDULES[check_name("schedule", schedule, SCHEDULES)] if isinstance(schedule, str) else schedule
        )
        self._start, self._end = start, end
        self._limits: dict[str, Any] = {"scope": check_name("scope", scope, ("global", "layer"))}
        self._limits |= {"cap": cap, "minimum": minimum}
        self._model, self._optimizer = model, optimizer
        self._hold: Hold | None = None

    @property
    def masks(self) -> Masks | None:
        """The masks in force; ``None`` before the first update."""
        return self._hold.masks if self._hold is not None else None

    def sparsity_at(self, progress: float) -> float:
        """The sparsity that the schedule asks for when this share of training has passed."""
        if not 0 <= progress <= 1:
            raise ValueError(f"progress is the share of training that has passed, in [0, 1], not {progress!r}.")
        passed = (progress - self._start) / (self._end - self._start)
        return self.target * self._schedule(min(1.0, max(0.0, passed)))

    def update(self, scores: Mapping[str, Tensor], progress: float) -> Pruned:
        """Prune up to what the schedule asks for at ``progress``; never less than before.

        Raises:
            ValueError: Scores or progress are not usable; the masks in force stay.
        """
        check_fit(self._model, scores)
        requested = self.sparsity_at(progress)
        old = self.masks
        if old is not None:
            if set(old) != set(scores):
                raise ValueError("the scores are for other parameters than those of the earlier updates.")
            scores = {n: s.masked_fill(~old[n].to(s.device), -float("inf")) for n, s in scores.items()}
        ranking = Ranking(scores, **self._limits)
        if round(self.target * ranking.total) > round(ranking.limit * ranking.total):
            raise ValueError(
                f"the target of {self.target:g} is out of reach: with the cap and the minimum in each layer at most "
                f"{ranking.limit:.6g} can be removed."
            )
        fallen = old.total - old.kept if old is not None else 0
        masks = ranking.removing(max(fallen, round(requested * ranking.total)))
        if old is not None:
            masks = masks & old
        self._set(masks)
        return report(requested, masks)

    def release(self) -> None:
        """Let go of the masks; the zeros are then ordinary weights."""
        if self._hold is not None:
            self._hold.release()

    def state_dict(self) -> dict[str, Any]:
        """The masks in force, for a checkpoint."""
        return {"masks": dict(self.masks) if self.masks is not None else None}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Put the masks of :meth:`state_dict` in force."""
        if state["masks"] is not None:
            self._set(Masks(state["masks"]))

    def _set(self, masks: Masks) -> None:
        if self._hold is None:
            self._hold = masks.hold(self._model, self._optimizer)
        else:
            self._hold.update(masks)
