"""Pruning during training: masks that remove more and more along a schedule, for weights and for whole units."""

import copy
from collections.abc import Callable, Iterable, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from torch import Tensor, nn
from torch.optim import Optimizer

from shaver.criteria import PosteriorLike, needs, score
from shaver.criteria.prunable_weights import Rule, with_biases
from shaver.naming import check_count, check_name, check_number
from shaver.pruning.automatic import weigh
from shaver.pruning.masks import Hold, Masks
from shaver.pruning.pruned import Pruned, check_fit
from shaver.pruning.ranking import Ranking, check_sparsity
from shaver.repairing import repair
from shaver.repairing.calibration import calibration_list

if TYPE_CHECKING:
    from shaver.spam import SpaM

#: From the share of the pruning period that has passed to the share of the final sparsity, both in [0, 1].
Shape = Callable[[float], float]


def linear(progress: float) -> float:
    """t: the same number of weights is removed at each update, as in the paper."""
    return progress


def cubic(progress: float) -> float:
    """1 − (1 − t)³: most weights are removed early, while the network still has time to adapt (Zhu and Gupta, 2017)."""
    return 1 - (1 - progress) ** 3


SHAPES: dict[str, Shape] = {"linear": linear, "cubic": cubic}


def _is(given: object, name: str) -> bool:
    """Whether a name was given; an array would be compared element by element."""
    return isinstance(given, str) and given == name


class Selector(Protocol):
    """Chooses the weights or units of a network to keep. A selection is one boolean tensor per parameter or group."""

    def scores(self, criterion: str, posterior: PosteriorLike | None) -> Mapping[str, Tensor]:
        """One score per weight or unit that may be removed."""
        ...

    def select(
        self, scores: Mapping[str, Tensor], sparsity: float, final: float, kept: Mapping[str, Tensor] | None
    ) -> Mapping[str, Tensor]:
        """The selection at this sparsity, a subset of ``kept``. ``final`` is the sparsity at the end of training."""
        ...

    def masks(self, kept: Mapping[str, Tensor]) -> Masks:
        """The masks of a selection."""
        ...


@dataclass(frozen=True, eq=False)
class Schedule:
    """The settings of pruning during training: how much to remove, by which criterion, and when.

    :class:`Online` removes weights and :class:`shaver.structure.Gradual` whole units.

    Attributes:
        sparsity: The final share to remove, in [0, 1); :class:`Online` also takes ``"auto"``.
        criterion: The criterion. Default: OPD with SpaM, magnitude with MAP and L1. A criterion that needs data cannot
            be used: during training only the weights and the posterior are available.
        schedule: ``"linear"``, ``"cubic"`` or a function from [0, 1] to [0, 1].
        start: The share of training at which pruning begins. OPD always waits for SpaM's first update of δ.
        end: The share of training at which the final sparsity is reached. The network recovers in the rest.
        every: Steps between updates of the masks. With SpaM there is also one after each update of δ.
        debias: With SpaM: from ``end`` on the remaining weights train under SpaM's initial precision, so that the
            learned δ no longer pulls them to zero.
        calibration: Unlabelled batches. After each update of the masks the remaining weights are repaired with them, so
            that the outputs stay near those before it (:func:`shaver.repair`). Use it where little training follows the
            last update. Each repair takes a pass: a thousand samples and a larger ``every`` are enough.
    """

    #: Default options of SpaM for this kind of pruning. Weights are removed early, so learning δ does not wait; removed
    #: weights cannot return, so nothing is gained if δ no longer pulls the others.
    spam_defaults: ClassVar[Mapping[str, Any]] = {"burn_in": 0.1, "debias": False}
    #: Names that ``schedule`` may have.
    schedules: ClassVar[Iterable[str]] = tuple(SHAPES)

    sparsity: float | str
    _: KW_ONLY
    criterion: str | None = None
    schedule: str | Shape = "cubic"
    start: float = 0.1
    end: float = 0.5
    every: int = 50
    debias: bool = False
    calibration: Iterable[Any] | None = None

    def __post_init__(self) -> None:
        if not (self.by_evidence and _is(self.sparsity, "auto")):
            check_sparsity(self.sparsity)
        check_count("every", self.every)
        check_number("start", self.start)
        check_number("end", self.end)
        if not 0 <= self.start < self.end <= 1:
            raise ValueError(
                f"pruning runs from start to end with 0 ≤ start < end ≤ 1, not from {self.start} to {self.end}."
            )
        if not callable(self.schedule):
            check_name("schedule", self.schedule, self.schedules)
        if self.calibration is not None:
            object.__setattr__(self, "calibration", calibration_list(self.calibration))
        if self.criterion is not None and {"batches", "example"} & set(needs(self.criterion)):
            raise ValueError(
                f"criterion {self.criterion!r} needs data, which pruning during training does not read again; use "
                "'opd' (with SpaM), 'obd' (with SpaM) or 'magnitude'."
            )

    @property
    def by_evidence(self) -> bool:
        """Whether the evidence decides how much is removed at each update, see :class:`Online`."""
        return False

    def sparsity_at(self, progress: float) -> float:
        """The sparsity to reach after this share of training."""
        assert not isinstance(self.sparsity, str), "the evidence decides"
        if not 0 <= progress <= 1:
            raise ValueError(f"progress is the share of training that has passed, in [0, 1], not {progress!r}.")
        shape = SHAPES[self.schedule] if isinstance(self.schedule, str) else self.schedule
        passed = (progress - self.start) / (self.end - self.start)
        return self.sparsity * shape(min(1.0, max(0.0, passed)))

    def selector(self, model: nn.Module) -> Selector:
        """The selector for one network."""
        raise NotImplementedError


@dataclass(frozen=True, eq=False)
class Online(Schedule):
    """Prune weights during training: ``shaver.fit(model, train, online=shaver.pruning.Online(0.99))``.

    LeNet at 99 % sparsity is best if the masks are final at about 60 % of training.

    With ``schedule="evidence"``, each update of δ is followed by the removal of as many weights as ``prune(…, "auto")``
    would remove then, until the target is reached; what is missing at ``end`` is removed there. ``Online("auto")`` is
    the same without a target. Both need SpaM and OPD.

    Attributes:
        scope: ``"global"`` or ``"layer"``.
        cap: The largest share that any parameter may lose.
        minimum: Each parameter keeps at least this many weights.
        biases: Rank the biases together with the weights. Then ``sparsity`` is a share of both. At 99 % and more most
            of the biases can be removed too; otherwise they would be a third of what is left.
        budget: By evidence: the largest expected rise of the loss at each update, see :func:`shaver.prune`.
    """

    schedules: ClassVar[Iterable[str]] = (*SHAPES, "evidence")
    _: KW_ONLY
    scope: str = "global"
    cap: float = 1.0
    minimum: int = 0
    biases: bool = False
    budget: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_name("scope", self.scope, ("global", "layer"))
        if self.by_evidence and self.criterion not in (None, "opd"):
            raise ValueError(f"the evidence decides what is removed: leave out criterion={self.criterion!r}.")
        if self.budget is not None and not self.by_evidence:
            raise ValueError(f'budget={self.budget!r} needs sparsity="auto" or schedule="evidence".')

    @property
    def by_evidence(self) -> bool:
        """Whether the evidence decides how much is removed at each update."""
        return _is(self.sparsity, "auto") or _is(self.schedule, "evidence")

    def selector(self, model: nn.Module) -> "WeightSelector":
        """A selector of single weights."""
        limits = {"scope": self.scope, "cap": self.cap, "minimum": self.minimum}
        return WeightSelector(model, limits, with_biases(model) if self.biases else None)


class WeightSelector:
    """Chooses the single weights with the highest scores."""

    def __init__(self, model: nn.Module, limits: Mapping[str, Any], rule: Rule | None = None) -> None:
        self._model, self._limits, self._rule = model, limits, rule

    def scores(self, criterion: str, posterior: PosteriorLike | None) -> Mapping[str, Tensor]:
        """A score per weight."""
        return score(self._model, criterion, posterior=posterior, rule=self._rule)

    def select(
        self, scores: Mapping[str, Tensor], sparsity: float, final: float, kept: Mapping[str, Tensor] | None
    ) -> Mapping[str, Tensor]:
        """The masks at this sparsity. Weights that an earlier mask removed stay removed."""
        check_fit(self._model, scores)
        removed = 0
        if kept is not None:
            if set(kept) != set(scores):
                raise ValueError("the scores are for other parameters than those of the earlier updates.")
            scores = {n: s.masked_fill(~kept[n].to(s.device), -float("inf")) for n, s in scores.items()}
            removed = sum(int((~mask).sum()) for mask in kept.values())
        ranking = Ranking(scores, **self._limits)
        if round(final * ranking.total) > round(ranking.limit * ranking.total):
            raise ValueError(
                f"a sparsity of {final:g} is out of reach: with the cap and the minimum in each layer at most "
                f"{ranking.limit:.6g} can be removed."
            )
        masks = ranking.removing(max(removed, round(sparsity * ranking.total)))
        return masks if kept is None else masks & kept

    def masks(self, kept: Mapping[str, Tensor]) -> Masks:
        """The selection itself, as masks."""
        return Masks(kept)


class OnlinePruner:
    """Prunes a network during training along a schedule. What is removed never grows back.

    :func:`shaver.fit` calls :meth:`after_step` and :meth:`after_epoch`. In your own loop, call :meth:`update`.

    Example::

        pruner = OnlinePruner(model, optimizer, Online(0.99, start=0.0))
        for epoch in range(epochs):
            train_one_epoch(model, optimizer)
            pruner.update(score(model, "opd", posterior=spam.posterior), progress=(epoch + 1) / epochs)

    Args:
        model: The network in training.
        optimizer: Its optimizer, whose states of removed weights are zeroed too.
        schedule: :class:`Online` or :class:`shaver.structure.Gradual`.
        learner: Learns a posterior, such as SpaM; None for MAP and L1.

    Attributes:
        kept: The current selection, by parameter or group; ``None`` before the first update.

    Raises:
        ValueError: The criterion needs a posterior, but there is no learner.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, schedule: Schedule, learner: "SpaM | None" = None
    ) -> None:
        self.schedule = schedule
        self.kept: Mapping[str, Tensor] | None = None
        self._model, self._optimizer, self._learner = model, optimizer, learner
        has_evidence = learner is not None or schedule.by_evidence
        self._criterion = schedule.criterion or ("opd" if has_evidence else "magnitude")
        self._waits = "posterior" in needs(self._criterion)
        if self._waits and learner is None:
            raise ValueError(
                f'criterion {self._criterion!r} needs a posterior while the network trains, which only method="spam" '
                'learns; use criterion="magnitude" and a given sparsity here.'
            )
        self._selector = schedule.selector(model)
        self._hold: Hold | None = None
        self._steps_since = self._seen = 0
        self._reached = False

    @property
    def masks(self) -> Masks | None:
        """The current masks; ``None`` before the first update."""
        return self._hold.masks if self._hold is not None else None

    def update(self, scores: Mapping[str, Tensor], progress: float) -> Pruned:
        """Prune to the scheduled sparsity at ``progress``; never less than before.

        Raises:
            ValueError: Scores or progress are not usable; the current masks are kept.
        """
        if isinstance(self.schedule.sparsity, str):
            requested = final = self._automatic(scores)
        else:
            requested = final = self.schedule.sparsity
            if not self.schedule.by_evidence:
                requested = self.schedule.sparsity_at(progress)
            elif progress < self.schedule.end:
                requested = min(final, self._automatic(scores))
        kept = self._selector.select(scores, requested, final, self.kept)
        before = 0.0 if self.masks is None else self.masks.sparsity
        reference = None if self.schedule.calibration is None else copy.deepcopy(self._model)
        self._set(kept)
        if reference is not None and self.masks is not None and self.masks.sparsity > before:
            repair(self._model, self.schedule.calibration, reference=reference, masks=self.masks)
        if self.schedule.debias and self._learner is not None and progress >= self.schedule.end:
            self._learner.debias()
        return Pruned(requested, self._selector.masks(kept))

    def after_step(self, progress: float) -> None:
        """Call this after each step, with the share of training that has passed; prunes if it is due."""
        self._steps_since += 1
        is_time = self._steps_since >= self.schedule.every and not self.schedule.by_evidence
        due = is_time or progress >= self.schedule.end or self._updated()
        if progress > self.schedule.start and due:
            self._cut(progress)

    def after_epoch(self, progress: float) -> None:
        """Call this after each epoch, when δ may have been updated; after the last epoch the target is reached."""
        if progress >= 1 or (progress > self.schedule.start and self._updated()):
            self._cut(progress)

    def release(self) -> None:
        """Stop holding the masks; the zeros become ordinary weights."""
        if self._hold is not None:
            self._hold.release()

    def state_dict(self) -> dict[str, Any]:
        """The selection and counters, for a checkpoint."""
        counters = {"steps_since": self._steps_since, "seen": self._seen, "reached": self._reached}
        return counters | {"kept": None if self.kept is None else dict(self.kept)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, and apply its masks."""
        self._steps_since, self._seen, self._reached = state["steps_since"], state["seen"], state["reached"]
        if state["kept"] is not None:
            self._set(state["kept"])

    def _automatic(self, names: Iterable[str]) -> float:
        """The share of the named weights that automatic sparsity would remove now."""
        assert self._learner is not None
        assert isinstance(self.schedule, Online)
        worth = weigh(self._model, self._learner.posterior, names)
        return Masks(worth.kept(budget=self.schedule.budget)).sparsity

    def _updated(self) -> bool:
        """Whether δ was updated since the masks were."""
        return self._learner is not None and self._learner.updates > self._seen

    def _cut(self, progress: float) -> None:
        learner = self._learner
        must_end = progress >= 1 and self.schedule.sparsity != "auto"  # even if δ was never learned
        if self._reached or (self._waits and not must_end and learner is not None and not learner.updates):
            return
        posterior = learner.posterior if self._waits and learner is not None else None
        self.update(self._selector.scores(self._criterion, posterior), progress)
        self._steps_since = 0
        self._seen = learner.updates if learner is not None else 0
        self._reached = progress >= self.schedule.end

    def _set(self, kept: Mapping[str, Tensor]) -> None:
        masks = self._selector.masks(kept)
        if self._hold is None:
            self._hold = masks.hold(self._model, self._optimizer)
        else:
            self._hold.update(masks)
        self.kept = kept
