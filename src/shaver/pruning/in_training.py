"""Online pruning inside :func:`shaver.fit`: what is asked for, and at which steps it happens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from shaver.criteria import PosteriorLike, needs, score
from shaver.pruning.masks import Masks
from shaver.pruning.online import OnlinePruner, Schedule


class Learner(Protocol):
    """What learns a posterior while the network trains; :class:`shaver.SpaM` is one."""

    updates: int

    @property
    def posterior(self) -> PosteriorLike:
        """The posterior at the present weights."""
        ...


@dataclass(frozen=True)
class Online:
    """Prune while training: ``shaver.fit(model, train, online=shaver.pruning.Online(0.99))``.

    Attributes:
        target: The final sparsity, in [0, 1).
        criterion: ``None`` is OPD where SpaM learns a posterior, and magnitude for MAP and L1. One that needs data
            cannot be used: during training there are only the weights and the posterior.
        schedule: ``"linear"``, ``"cubic"`` or a function from [0, 1] to [0, 1].
        start: The share of training at which pruning begins. OPD waits for SpaM's first update of δ in any case.
        end: The share at which the target is reached; the rest of training recovers.
        every: Steps between two cuts. With SpaM there is also one right after each update of δ.
        scope: ``"global"`` or ``"layer"``.
        cap: No parameter loses more than this share.
        minimum: Each parameter keeps at least so many weights.
    """

    target: float
    criterion: str | None = None
    schedule: str | Schedule = "cubic"
    start: float = 0.1
    end: float = 0.5
    every: int = 50
    scope: str = "global"
    cap: float = 1.0
    minimum: int = 0

    def __post_init__(self) -> None:
        self._pruner(nn.Identity(), None)  # its checks, before any training
        check_online(self.criterion, self.every)

    def begin(self, model: nn.Module, optimizer: Optimizer, learner: Learner | None) -> "OnlineRun":
        """Attach to a network in training.

        Raises:
            ValueError: The criterion needs a posterior and nothing learns one.
        """
        return OnlineRun(
            self, online_criterion(self.criterion, learner), self._pruner(model, optimizer), model, learner
        )

    def _pruner(self, model: nn.Module, optimizer: Optimizer | None) -> OnlinePruner:
        return OnlinePruner(
            model,
            optimizer,
            self.target,
            schedule=self.schedule,
            start=self.start,
            end=self.end,
            scope=self.scope,
            cap=self.cap,
            minimum=self.minimum,
        )


def check_online(criterion: str | None, every: int) -> None:
    """Refuse a criterion that cannot be used while training, and an interval below one step."""
    if every < 1:
        raise ValueError(f"every must be at least 1 step, not {every!r}.")
    if criterion is not None and "batches" in needs(criterion):
        raise ValueError(
            f"criterion {criterion!r} needs data, which online pruning does not read again; use 'opd' (with SpaM), "
            "'obd' (with SpaM) or 'magnitude'."
        )


def online_criterion(criterion: str | None, learner: Learner | None) -> str:
    """The criterion, or the best that there is for the method of training.

    Raises:
        ValueError: It needs a posterior and nothing learns one.
    """
    name = criterion or ("magnitude" if learner is None else "opd")
    if "posterior" in needs(name) and learner is None:
        raise ValueError(
            f'criterion {name!r} needs a posterior while the network trains, which only method="spam" learns; '
            'use criterion="magnitude" here.'
        )
    return name


class Timing(Protocol):
    """When to prune: from ``start`` to ``end`` of training, at least every so many steps."""

    @property
    def start(self) -> float: ...  # noqa: D102

    @property
    def end(self) -> float: ...  # noqa: D102

    @property
    def every(self) -> int: ...  # noqa: D102


class OnlineRun:
    """Online pruning of one network in training, from :meth:`Online.begin`."""

    def __init__(
        self, asked: Timing, criterion: str, pruner: OnlinePruner, model: nn.Module, learner: Learner | None
    ) -> None:
        self._asked, self._criterion, self._pruner = asked, criterion, pruner
        self._model, self._learner = model, learner
        self._waits = "posterior" in needs(criterion)
        self._steps_since = self._seen = 0
        self._reached = False

    @property
    def masks(self) -> Masks | None:
        """The masks in force; ``None`` before the first cut."""
        return self._pruner.masks

    def after_step(self, progress: float) -> None:
        """To be called after each step, with the share of training that has passed; cuts when it is time."""
        self._steps_since += 1
        asked = self._asked
        if progress > asked.start and (self._steps_since >= asked.every or progress >= asked.end or self._fresh()):
            self._cut(progress)

    def after_epoch(self, progress: float) -> None:
        """To be called after each epoch, when δ may have been updated; after the last, the target is reached."""
        if progress >= 1 or (progress > self._asked.start and self._fresh()):
            self._cut(progress)

    def _fresh(self) -> bool:
        return self._learner is not None and self._learner.updates > self._seen

    def _cut(self, progress: float) -> None:
        if self._reached or (self._waits and progress < 1 and self._learner is not None and not self._learner.updates):
            return
        posterior = self._learner.posterior if self._waits and self._learner is not None else None
        self._pruner.update(self._scores(posterior), progress)
        self._steps_since = 0
        self._seen = self._learner.updates if self._learner is not None else 0
        self._reached = progress >= self._asked.end

    def _scores(self, posterior: PosteriorLike | None) -> dict[str, Tensor]:
        return score(self._model, self._criterion, posterior=posterior)

    def release(self) -> None:
        """Let go of the masks; the zeros are then ordinary weights."""
        self._pruner.release()

    def state_dict(self) -> dict[str, Any]:
        """Masks and counters, for a checkpoint."""
        return self._pruner.state_dict() | {
            "steps_since": self._steps_since,
            "seen": self._seen,
            "reached": self._reached,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take :meth:`state_dict` back."""
        self._pruner.load_state_dict(state)
        self._steps_since, self._seen, self._reached = state["steps_since"], state["seen"], state["reached"]
