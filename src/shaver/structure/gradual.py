"""Gradual structured pruning: units fall along a schedule while the network is trained."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.optim import Optimizer

from shaver.criteria import PosteriorLike
from shaver.measure.example import Example
from shaver.pruning.in_training import Learner, OnlineRun, check_online, online_criterion
from shaver.pruning.online import OnlinePruner, Schedule
from shaver.pruning.pruned import Pruned, report
from shaver.structure.choice import ChoiceOptions, Chooser
from shaver.structure.groups import Groups, mask_units
from shaver.structure.scores import score_units
from shaver.structure.search import find_groups


@dataclass(frozen=True, eq=False)
class Gradual:
    """Remove units while training, a few at a time, so that the others can take over.

    Example:
        >>> gradual = shaver.structure.Gradual(0.8, example=x, target="flops")
        >>> history = shaver.fit(model, train, online=gradual)
        >>> small = shaver.compact(model, x, masks=history.masks)

    Units that have fallen are masked and stay away; :func:`shaver.compact` then removes them for good. Under SpaM the
    prior is ``"unit"`` unless ``fit(…, spam={"prior": …})`` asks for another: one precision for each input and output
    unit of a layer lets the evidence switch off whole units, which is what is going to be removed.

    Attributes:
        sparsity: The final share of the target that goes, in [0, 1).
        example: An input, to find the groups and to count FLOPs.
        groups: What may go, in place of the groups found with the example.
        criterion: ``None`` is OPD where SpaM learns a posterior, and magnitude for MAP and L1; summed over all that
            belongs to a unit.
        target: ``"units"``, ``"parameters"`` or ``"flops"``.
        spread: ``"uniform"`` or ``"global"``.
        normalise: Under ``"global"``; see :class:`ChoiceOptions`, as for the next two.
        round_to: Widths become multiples of this.
        min_units: Each group keeps at least so many.
        schedule: ``"linear"``, ``"cubic"`` or a function from [0, 1] to [0, 1].
        start: The share of training at which pruning begins.
        end: The share at which the target is reached; the rest of training recovers.
        every: Steps between two cuts. With SpaM there is also one right after each update of δ.
    """

    spam_defaults: ClassVar[Mapping[str, str]] = {"prior": "unit"}

    sparsity: float = 0.8
    example: Example | None = None
    groups: Groups | None = None
    criterion: str | None = None
    target: str = "units"
    spread: str = "uniform"
    normalise: str | None = None
    round_to: int = 1
    min_units: int = 1
    schedule: str | Schedule = "cubic"
    start: float = 0.2
    end: float = 0.7
    every: int = 50

    def __post_init__(self) -> None:
        check_online(self.criterion, self.every)
        how = self._how()
        if how.target == "latency":
            raise ValueError('target="latency" would be measured anew at each cut; use "flops" while training.')
        if self.example is None and (self.groups is None or how.target == "flops"):
            raise ValueError("Gradual needs example=… (an input), to find the groups and to count FLOPs.")
        OnlinePruner(nn.Identity(), None, self.sparsity, schedule=self.schedule, start=self.start, end=self.end)

    def begin(self, model: nn.Module, optimizer: Optimizer, learner: Learner | None) -> "GradualRun":
        """Attach to a network in training.

        Raises:
            ValueError: The criterion needs a posterior and nothing learns one.
        """
        name = online_criterion(self.criterion, learner)
        groups = self.groups
        if groups is None:
            assert self.example is not None
            groups = find_groups(model, self.example)
        pruner = UnitPruner(model, optimizer, groups, self._how(), self)
        return GradualRun(self, name, pruner, model, learner)

    def _how(self) -> ChoiceOptions:
        return ChoiceOptions(self.target, self.spread, self.normalise, self.round_to, self.min_units)


class UnitPruner(OnlinePruner):
    """Prunes units during training; what has fallen never comes back.

    Attributes:
        groups: The network's groups.
        kept: Group → which units stand.
    """

    def __init__(
        self, model: nn.Module, optimizer: Optimizer | None, groups: Groups, how: ChoiceOptions, asked: Gradual
    ) -> None:
        super().__init__(model, optimizer, asked.sparsity, schedule=asked.schedule, start=asked.start, end=asked.end)
        self.groups, self.kept = groups, groups.whole
        self._chooser = Chooser(model, groups, how, asked.example)

    def update(self, scores: Mapping[str, Tensor], progress: float) -> Pruned:
        """Prune up to what the schedule asks for at ``progress``, by one score a unit for each group."""
        requested = self.sparsity_at(progress)
        # What the whole target would keep is spared until then: else one group is thinned out for FLOPs that a wide
        # unit of another saves soon after, and what has fallen cannot come back.
        spare = self._chooser.choose(scores, self.target, self.kept).kept if requested < self.target else None
        self.kept = self._chooser.choose(scores, requested, self.kept, spare).kept
        masks = mask_units(self._model, self.groups, self.kept)
        self._set(masks)
        return report(requested, masks)

    def state_dict(self) -> dict[str, Any]:
        """The units that stand and the masks in force."""
        return super().state_dict() | {"kept": self.kept}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take :meth:`state_dict` back."""
        super().load_state_dict(state)
        self.kept = dict(state["kept"])


class GradualRun(OnlineRun):
    """Gradual pruning of one network in training, from :meth:`Gradual.begin`."""

    _pruner: UnitPruner

    def _scores(self, posterior: PosteriorLike | None) -> dict[str, Tensor]:
        return score_units(self._model, self._pruner.groups, self._criterion, posterior=posterior)
