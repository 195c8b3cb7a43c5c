"""Choosing the units to keep: per group or over all groups, for a share of units, parameters, FLOPs or latency."""

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, replace

import torch
from torch import Tensor, nn

from shaver.measure.example import Example
from shaver.naming import check_count, check_name
from shaver.pruning.ranking import Ranking, check_scores, check_sparsity
from shaver.structure.costs import TARGETS, Costs
from shaver.structure.groups import Groups, Kept, check_groups

SPREADS = ("uniform", "global")
NORMALISATIONS = ("mean", "price", "none")
_PRICED = ("parameters", "flops")


@dataclass(frozen=True)
class Choice:
    """The units to keep. ``print(choice)`` shows a table.

    Attributes:
        kept: Group → one truth value per unit.
        target: What the sparsity is a share of: ``"units"``, ``"parameters"``, ``"flops"`` or ``"latency"``.
        requested: The share to remove; None where masks or dead units decided.
        achieved: The share that is removed. For units it is as near as whole units and ``round_to`` allow; for any
            other target it is the smallest share that is at least the requested one.
    """

    kept: dict[str, Tensor]
    target: str
    requested: float | None
    achieved: float

    @classmethod
    def of(cls, kept: dict[str, Tensor]) -> "Choice":
        """Units that something other than a sparsity has chosen."""
        share = 1 - sum(int(k.sum()) for k in kept.values()) / sum(len(k) for k in kept.values())
        return cls(kept, "units", None, share)

    @property
    def widths(self) -> dict[str, tuple[int, int]]:
        """Group → units before and after."""
        return {name: (len(keep), int(keep.sum())) for name, keep in self.kept.items()}

    def __str__(self) -> str:
        width = max(5, *map(len, self.kept))
        lines = [f"{'group':<{width}}  {'units':>6}  {'kept':>6}  sparsity"]
        lines += [f"{n:<{width}}  {b:>6}  {a:>6}  {1 - a / b:8.4f}" for n, (b, a) in self.widths.items()]
        before, after = (sum(column) for column in zip(*self.widths.values(), strict=True))
        lines.append(f"{'all':<{width}}  {before:>6}  {after:>6}  {1 - after / before:8.4f}")
        asked = "units that do nothing" if self.requested is None else f"requested {self.requested:.4f}"
        lines.append(f"share of {self.target} removed: {asked}, achieved {self.achieved:.4f}")
        return "\n".join(lines)


@dataclass(frozen=True)
class ChoiceOptions:
    """How units are chosen: the settings of a :class:`Chooser`.

    Attributes:
        target: What the sparsity is a share of: ``"units"``, ``"parameters"``, ``"flops"`` or ``"latency"``.
        spread: ``"uniform"`` removes the same share of each group, as in the paper; ``"global"`` ranks the units of
            all groups together, so that each group can have its own width.
        normalise: What makes scores of different groups comparable under ``"global"``. ``"mean"`` divides by the mean
            of the group, ``"price"`` by the parameters or FLOPs that a unit of the group costs; ``"none"`` leaves
            scores as they are, which suits OPD: it is in nats everywhere. ``None`` is the price where the
            target has one, else the mean.
        round_to: Widths are rounded up to multiples of this where the group is wide enough, for fast hardware kernels.
            A head of 64 features is a multiple of 8 already.
        min_units: Each group keeps at least this many units, or all it has.
    """

    _: KW_ONLY
    target: str = "units"
    spread: str = "uniform"
    normalise: str | None = None
    round_to: int = 1
    min_units: int = 1

    def __post_init__(self) -> None:
        check_name("target", self.target, TARGETS)
        if self.normalise is None:
            object.__setattr__(self, "normalise", "price" if self.target in _PRICED else "mean")
        check_name("spread", self.spread, SPREADS)
        check_name("normalisation", str(self.normalise), NORMALISATIONS)
        check_count("round_to", self.round_to)
        check_count("min_units", self.min_units)
        if self.normalise == "price" and self.target not in _PRICED:
            raise ValueError(f'normalise="price" works with target="parameters" or "flops", not {self.target!r}.')


class Chooser:
    """Chooses units of one network, any number of times; costs measured for one choice are reused by the next.

    Example:
        >>> scores = score_units(model, groups, "opd", posterior=spam.posterior)
        >>> choice = Chooser(model, groups, ChoiceOptions(target="flops"), example=x).choose(scores, 0.8)
        >>> choice.achieved, choice.widths["conv1"]         # (0.8041, (6, 3))

    A target of units is met to the nearest whole unit. For parameters, FLOPs and latency, bisection finds the fewest
    units whose removal saves at least the share asked for; every cost is that of a network of these widths. Where
    widths are free, the best of the removed units then come back as long as that share allows.

    Args:
        model: The network; not changed.
        groups: Its groups.
        how: The settings.
        example: An input, for a target of FLOPs or latency.
        ties: Group → a label that it shares with the groups that must keep the same number of units.
    """

    def __init__(
        self,
        model: nn.Module,
        groups: Groups,
        how: ChoiceOptions,
        example: Example | None = None,
        ties: Mapping[str, str] | None = None,
    ) -> None:
        if not check_groups(groups, model):
            raise ValueError(f"{type(model).__name__} has no groups of units to choose from.")
        self._groups, self._how = groups, how
        labels = dict.fromkeys((ties or {}).values())
        self._ties = [[name for name, its in (ties or {}).items() if its == label] for label in labels]
        self._costs = None if how.target == "units" else Costs(model, groups, how.target, example)

    def choose(
        self, scores: Mapping[str, Tensor], sparsity: float, among: Kept | None = None, spare: Kept | None = None
    ) -> Choice:
        """Choose the units to keep.

        Args:
            scores: Group → one score per unit; the lowest are removed first, ties by position.
            sparsity: The share of the target to remove, in [0, 1).
            among: Units that have not been removed yet; the others stay removed.
            spare: Units that are removed after all others, whatever their scores.

        Raises:
            ValueError: Scores are missing, NaN or of another length, or the target is out of reach.
        """
        requested = check_sparsity(sparsity)
        self._check(scores)
        values = self._comparable(scores, among)
        if spare is not None:
            values = _spared(values, spare)
        scope = "layer" if self._how.spread == "uniform" else "global"
        ranking = Ranking(values, scope=scope, minimum=self._how.min_units)

        def keeping(count: int) -> dict[str, Tensor]:
            kept = self._rounded(ranking.removing(count), values)
            return kept if among is None else {name: keep & among[name] for name, keep in kept.items()}

        most = round(ranking.limit * ranking.total)
        if self._costs is None:
            count = round(requested * ranking.total)
            if count > most:
                raise ValueError(
                    f"a sparsity of {requested:g} is out of reach: with at least {self._how.min_units} units kept in "
                    f"each group, {most / ranking.total:.4g} of the {ranking.total} units can be removed."
                )
            return replace(Choice.of(keeping(count)), requested=requested)
        dense = self._costs.dense
        goal = (1 - requested) * dense * (1 + 1e-12)
        if self._costs(keeping(most)) > goal:
            reached = 1 - self._costs(keeping(most)) / dense
            raise ValueError(
                f"{requested:g} less {self._how.target} is out of reach: with {self._how.min_units} units left in each "
                f"group (round_to={self._how.round_to}) it is {reached:.4f} less. Groups: {', '.join(self._groups)}."
            )
        low, high = -1, most
        while high - low > 1:  # the fewest units whose removal is enough
            middle = (low + high) // 2
            low, high = (low, middle) if self._costs(keeping(middle)) <= goal else (middle, high)
        kept = keeping(high)
        if self._how.spread == "global" and self._how.round_to == 1 and not self._ties:
            self._fill(kept, values, self._costs, goal)
        return Choice(kept, self._how.target, requested, 1 - self._costs(kept) / dense)

    def _fill(self, kept: dict[str, Tensor], values: Mapping[str, Tensor], costs: Costs, goal: float) -> None:
        """Bring back the best removed units while the goal allows: one wide unit may have overshot it."""
        best = {name: values[name].masked_fill(keep, -math.inf) for name, keep in kept.items()}
        while best:
            name = max(best, key=lambda group: float(best[group].max()))
            unit = int(best[name].argmax())
            if best[name][unit] == -math.inf:
                del best[name]
                continue
            kept[name][unit] = True
            if costs(kept) <= goal:
                best[name][unit] = -math.inf
            else:  # no other of this group fits either
                kept[name][unit] = False
                del best[name]

    def _check(self, scores: Mapping[str, Tensor]) -> None:
        if not isinstance(scores, Mapping):
            raise TypeError(f"scores are a dict of one tensor per group, from score_units, not {scores!r}.")
        check_scores(scores)
        for name, group in self._groups.items():
            if name not in scores or scores[name].shape != (group.units,):
                given = tuple(scores[name].shape) if name in scores else "none"
                raise ValueError(f"group {name!r} takes {group.units} scores, one per unit; given: {given}.")

    def _comparable(self, scores: Mapping[str, Tensor], among: Kept | None) -> dict[str, Tensor]:
        values = {name: scores[name].detach().double().cpu() for name in self._groups}
        for name, score in values.items():
            standing = score if among is None else score[among[name]]
            if self._how.spread == "global":
                values[name] = score / self._scale(name, standing)
            if among is not None:
                values[name] = values[name].masked_fill(~among[name], -math.inf)
        for tied in self._ties:
            # Tied groups get the same values, the mean at each rank, so that each loses as many units as the others.
            mean = torch.stack([values[name].sort().values for name in tied]).mean(0)
            for name in tied:
                values[name] = torch.empty_like(mean).scatter_(0, values[name].argsort(stable=True), mean)
        return values

    def _scale(self, name: str, standing: Tensor) -> float:
        kind = self._how.normalise
        if kind == "none":
            return 1.0
        if kind == "price":
            assert self._costs is not None
            return max(self._costs.price(name), 1.0)
        scale = float(standing.abs().mean())
        return scale if scale > 0 and math.isfinite(scale) else 1.0

    def _rounded(self, kept: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._how.round_to == 1 and not self._ties:
            return dict(kept)
        widths = {}
        for name, keep in kept.items():
            makes = [piece.index.shape[1] for piece in self._groups[name].slices if piece.role == "makes"]
            # the number of units whose width is a multiple of round_to
            step = self._how.round_to // math.gcd(self._how.round_to, min(makes, default=1))
            widths[name] = min(len(keep), math.ceil(int(keep.sum()) / step) * step)
        for tied in self._ties:
            widths |= dict.fromkeys(tied, max(widths[name] for name in tied))
        return {
            name: Ranking({name: values[name]}).removing(len(keep) - widths[name])[name] for name, keep in kept.items()
        }


def _spared(values: Mapping[str, Tensor], spare: Kept) -> dict[str, Tensor]:
    """Values that rank the units to be spared above all others, in their own order."""
    finite = torch.cat([value[value.isfinite()] for value in values.values()])
    lift = 2 * float(finite.max() - finite.min()) or 1.0
    return {name: torch.where(spare[name], value + lift, value) for name, value in values.items()}
