"""Pruning of whole units during training: units are removed along a schedule, so that the kept units can adapt."""

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

from torch import Tensor, nn

from shaver.criteria import PosteriorLike
from shaver.measure.example import Example
from shaver.pruning.masks import Masks
from shaver.pruning.online import Schedule
from shaver.structure.choice import ChoiceOptions, Chooser
from shaver.structure.groups import Groups, mask_units
from shaver.structure.scores import score_units
from shaver.structure.search import find_groups


@dataclass(frozen=True, eq=False)
class Gradual(Schedule, ChoiceOptions):
    """Remove units while training, a few at a time.

    Example:
        >>> gradual = shaver.structure.Gradual(0.8, example=x, target="flops")
        >>> history = shaver.fit(model, train, online=gradual)
        >>> small = shaver.compact(model, x, masks=history.masks)

    Removed units are masked and stay masked; :func:`shaver.compact` then makes the network smaller. Under SpaM the
    prior is ``"unit"`` unless ``fit(…, spam={"prior": …})`` asks for another: one precision per input and output unit
    of a layer lets the evidence switch off whole units, which is what is going to be removed. How units are chosen is
    set as in :class:`ChoiceOptions`; a target of latency is not possible.

    Attributes:
        example: An input, to find the groups and to count FLOPs.
        groups: What may be removed, in place of the groups found with the example.
    """

    spam_defaults: ClassVar[Mapping[str, Any]] = {**Schedule.spam_defaults, "prior": "unit"}
    __eq__, __hash__ = object.__eq__, object.__hash__  # not those of ChoiceOptions: an example cannot be compared

    sparsity: float = 0.8
    example: Example | None = None
    groups: Groups | None = None
    _: KW_ONLY
    start: float = 0.2
    end: float = 0.7

    def __post_init__(self) -> None:
        Schedule.__post_init__(self)
        ChoiceOptions.__post_init__(self)
        if self.target == "latency":
            raise ValueError('target="latency" would have to be measured at each cut; use "flops" while training.')
        if self.example is None and (self.groups is None or self.target == "flops"):
            raise ValueError("Gradual needs example=… (an input), to find the groups and to count FLOPs.")

    def selector(self, model: nn.Module) -> "UnitSelector":
        """Chooses whole units."""
        groups = find_groups(model, self.example) if self.groups is None else self.groups
        return UnitSelector(model, groups, self, self.example)


class UnitSelector:
    """Keeps the best units of a network: one boolean per unit of each group."""

    def __init__(self, model: nn.Module, groups: Groups, how: ChoiceOptions, example: Example | None) -> None:
        self._model, self._groups = model, groups
        self._chooser = Chooser(model, groups, how, example)

    def scores(self, criterion: str, posterior: PosteriorLike | None) -> Mapping[str, Tensor]:
        """A score per unit of each group, summed over everything that belongs to it."""
        return score_units(self._model, self._groups, criterion, posterior=posterior)

    def select(
        self, scores: Mapping[str, Tensor], sparsity: float, final: float, kept: Mapping[str, Tensor] | None
    ) -> Mapping[str, Tensor]:
        """The units to keep. Units that were removed earlier stay removed."""
        standing = self._groups.whole if kept is None else dict(kept)
        # Units that the final sparsity keeps are spared until then. Otherwise one group would be thinned out for FLOPs
        # that a wide unit of another group saves soon after, and removed units cannot come back.
        spare = self._chooser.choose(scores, final, standing).kept if sparsity < final else None
        return self._chooser.choose(scores, sparsity, standing, spare).kept

    def masks(self, kept: Mapping[str, Tensor]) -> Masks:
        """The masks that remove everything that belongs to the units."""
        return mask_units(self._model, self._groups, kept)
