"""Which units stay: so many of each group, or the best of all, down to a share of units, parameters, FLOPs or time."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from shaver.measure.example import Example
from shaver.naming import check_name
from shaver.pruning.ranking import Ranking, check_scores, check_sparsity
from shaver.structure.groups import Group, Groups
from shaver.structure.targets import TARGETS, Costs, Kept

SPREADS = ("uniform", "global")
NORMALISATIONS = ("mean", "norm", "price", "none")
_PRICED = ("parameters", "flops")


@dataclass(frozen=True)
class Chosen:
    """Which units were chosen to stay. ``print(chosen)`` shows a table.

    Attributes:
        kept: Group → one truth value a unit.
        target: What the sparsity is a share of: ``"units"``, ``"parameters"``, ``"flops"`` or ``"latency"``.
        requested: The share asked for; None where masks had chosen.
        achieved: The share that goes. Of units it is as near as whole units and ``round_to`` allow; of anything else
            the first that is at least what was asked for.
    """

    kept: dict[str, Tensor]
    target: str
    requested: float | None
    achieved: float

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
        asked = "" if self.requested is None else f"requested {self.requested:.4f} less, "
        lines.append(f"{self.target}: {asked}achieved {self.achieved:.4f} less")
        return "\n".join(lines)


@dataclass(frozen=True)
class Choosing:
    """How units are chosen.

    Attributes:
        target: What the sparsity is a share of: ``"units"``, ``"parameters"``, ``"flops"`` or ``"latency"``.
        spread: ``"uniform"`` takes the same share of each group, as in the paper; ``"global"`` ranks the units of all
            groups together, so that widths come out freely.
        normalise: What makes scores of different groups comparable under ``"global"``. ``"mean"``: relative to the
            mean of the group; ``"norm"``: to the root of its summed squares; ``"price"``: for each parameter or FLOP
            that a unit of the group costs; ``"none"``: as they are, which OPD allows, for it is in nats everywhere.
            ``None`` is the price where the target has one, and else the mean.
        round_to: Widths become multiples of this, upwards, where the group is wide enough: what hardware likes. A head
            of 64 features is a multiple of 8 already.
        min_units: Each group keeps at least so many (or all it has).
    """

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
        for name in ("round_to", "min_units"):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise ValueError(f"{name} must be a whole number from 1, not {value!r}.")
        if self.normalise == "price" and self.target not in _PRICED:
            raise ValueError(f'normalise="price" goes with target="parameters" or "flops", not {self.target!r}.')


class Chooser:
    """Chooses units of one network, as often as asked; what was measured for one choice serves the next.

    Args:
        model: The network; not changed.
        groups: Its groups.
        how: The settings.
        example: An input, for a target of FLOPs or latency.
    """

    def __init__(self, model: nn.Module, groups: Groups, how: Choosing, example: Example | None = None) -> None:
        if not groups:
            raise ValueError(f"{type(model).__name__} has no groups of units to choose from.")
        groups.check(model)
        self._groups, self._how = groups, how
        self._costs = None if how.target == "units" else Costs(model, groups, how.target, example)

    def choose(
        self, scores: Mapping[str, Tensor], sparsity: float, among: Kept | None = None, spare: Kept | None = None
    ) -> Chosen:
        """The units that stay.

        Args:
            scores: Group → one score a unit; the lowest fall first, of equal ones the first.
            sparsity: The share of the target that goes, in [0, 1).
            among: Units that have not fallen yet; the others stay fallen.
            spare: Units that fall after all others, whatever their scores.

        Raises:
            ValueError: Scores are missing, NaN or of another length, or the target is out of reach.
        """
        requested = check_sparsity(sparsity)
        self._check(scores)
        values = self._comparable(scores, among)
        if spare is not None:
            values = _spared(values, spare)
        ranking = Ranking(
            values, scope="layer" if self._how.spread == "uniform" else "global", minimum=self._how.min_units
        )

        def keeping(count: int) -> dict[str, Tensor]:
            kept = self._rounded(ranking.removing(count), values)
            return kept if among is None else {name: keep & among[name] for name, keep in kept.items()}

        most = round(ranking.limit * ranking.total)
        if self._costs is None:
            kept = keeping(self._units_to_remove(requested, most, ranking.total))
            return Chosen(kept, "units", requested, 1 - sum(int(k.sum()) for k in kept.values()) / ranking.total)
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
        if self._how.spread == "global" and self._how.round_to == 1:
            self._fill(kept, values, self._costs, goal)
        return Chosen(kept, self._how.target, requested, 1 - self._costs(kept) / dense)

    def _fill(self, kept: dict[str, Tensor], values: Mapping[str, Tensor], costs: Costs, goal: float) -> None:
        """Bring back the best of the fallen while the goal allows: one wide unit may have overshot it."""
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

    def _units_to_remove(self, requested: float, most: int, total: int) -> int:
        count = round(requested * total)
        if count > most:
            raise ValueError(
                f"a sparsity of {requested:g} is out of reach: with at least {self._how.min_units} units kept in each "
                f"group, {most / total:.4g} of the {total} units can go."
            )
        return count

    def _check(self, scores: Mapping[str, Tensor]) -> None:
        check_scores(scores)
        for name, group in self._groups.items():
            if name not in scores or scores[name].shape != (group.units,):
                given = tuple(scores[name].shape) if name in scores else "none"
                raise ValueError(f"group {name!r} takes {group.units} scores, one a unit; given: {given}.")

    def _comparable(self, scores: Mapping[str, Tensor], among: Kept | None) -> dict[str, Tensor]:
        values = {name: scores[name].detach().double().cpu() for name in self._groups}
        for name, score in values.items():
            standing = score if among is None else score[among[name]]
            if self._how.spread == "global":
                values[name] = score / self._scale(name, standing)
            if among is not None:
                values[name] = values[name].masked_fill(~among[name], -math.inf)
        return values

    def _scale(self, name: str, standing: Tensor) -> float:
        kind = self._how.normalise
        if kind == "none":
            return 1.0
        if kind == "price":
            assert self._costs is not None
            return max(self._costs.price(name), 1.0)
        scale = float(standing.abs().mean() if kind == "mean" else standing.norm())
        return scale if scale > 0 and math.isfinite(scale) else 1.0

    def _rounded(self, kept: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> dict[str, Tensor]:
        if self._how.round_to == 1:
            return dict(kept)
        rounded = {}
        for name, keep in kept.items():
            step = _step(self._groups[name], self._how.round_to)
            width = min(len(keep), -(-int(keep.sum()) // step) * step)
            rounded[name] = Ranking({name: values[name]}).removing(len(keep) - width)[name]
        return rounded


def choose_units(
    model: nn.Module,
    groups: Groups,
    scores: Mapping[str, Tensor],
    sparsity: float = 0.8,
    *,
    example: Example | None = None,
    target: str = "units",
    spread: str = "uniform",
    normalise: str | None = None,
    round_to: int = 1,
    min_units: int = 1,
) -> Chosen:
    """Choose which units stay; nothing is changed yet.

    Example:
        >>> scores = score_units(model, groups, "opd", posterior=spam.posterior)            # doctest: +SKIP
        >>> chosen = choose_units(model, groups, scores, 0.8, target="flops", example=x)    # doctest: +SKIP
        >>> chosen.achieved, chosen.widths["conv1"]                                         # doctest: +SKIP
        (0.8041, (6, 3))

    A target of units is met to the nearest whole unit. For parameters, FLOPs and latency the fewest units go that
    save at least the share asked for, found by bisection; every cost on the way is that of a network really built.
    Where widths are free, the best of the fallen then come back as long as that share allows.

    Args:
        model: The network; not changed.
        groups: Its groups.
        scores: Group → one score a unit, from :func:`score_units`; the lowest fall first, of equal ones the first.
        sparsity: The share of the target that goes, in [0, 1).
        example: An input, for a target of FLOPs or latency.
        target: See :class:`Choosing`, as for the rest.
        spread: ``"uniform"`` or ``"global"``.
        normalise: Under ``"global"``: ``"mean"``, ``"norm"``, ``"price"``, ``"none"`` or ``None``.
        round_to: Widths become multiples of this.
        min_units: Each group keeps at least so many.

    Raises:
        ValueError: An option is out of range, scores do not fit the groups, or the target is out of reach.
    """
    how = Choosing(target, spread, normalise, round_to, min_units)
    return Chooser(model, groups, how, example).choose(scores, sparsity)


def _step(group: Group, round_to: int) -> int:
    """How many units make a width that is a multiple of ``round_to``."""
    width = min((piece.index.shape[1] for piece in group.slices if piece.role == "makes"), default=1)
    return round_to // math.gcd(round_to, width)


def _spared(values: Mapping[str, Tensor], spare: Kept) -> dict[str, Tensor]:
    """Values by which units to be spared rank above all others, each kind in its own order."""
    finite = torch.cat([value[value.isfinite()] for value in values.values()])
    lift = 2 * float(finite.max() - finite.min()) or 1.0
    return {name: torch.where(spare[name], value + lift, value) for name, value in values.items()}


def whole(groups: Groups) -> dict[str, Tensor]:
    """Every unit of every group."""
    return {name: torch.ones(group.units, dtype=torch.bool) for name, group in groups.items()}
