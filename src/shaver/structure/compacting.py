"""``compact``: from a trained network to a smaller dense one in a single call."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.optim import Optimizer

from shaver.batches import Forward
from shaver.criteria import PosteriorLike
from shaver.measure import Cost, cost
from shaver.measure.example import Example
from shaver.pruning.ranking import check_sparsity
from shaver.structure.choosing import Chooser, Choosing, Chosen
from shaver.structure.compaction import remove_units
from shaver.structure.finding import find_groups
from shaver.structure.groups import Groups
from shaver.structure.masking import kept_units
from shaver.structure.scores import score_units

if TYPE_CHECKING:
    from shaver.spam import SpaM


@dataclass(frozen=True)
class CompactReport:
    """What :func:`compact_with_report` did. ``print(report)`` shows widths and cost before and after.

    Attributes:
        model: The small network.
        groups: The groups of the network as it was.
        chosen: Which units stayed, what was asked for and what was reached.
        before: Parameters, bytes and FLOPs of the network as it was.
        after: The same of the small one.
    """

    model: nn.Module
    groups: Groups
    chosen: Chosen
    before: Cost
    after: Cost

    def __str__(self) -> str:
        lines = [str(self.chosen)]
        for title, key in (("parameters", "parameters"), ("bytes", "bytes_dense"), ("FLOPs a sample", "flops")):
            before, after = getattr(self.before, key), getattr(self.after, key)
            lines.append(f"{title:<14}  {before:>14,} → {after:>14,}  ÷ {before / max(after, 1):.2f}")
        return "\n".join(lines)


def compact(
    model: nn.Module,
    example: Example,
    *,
    criterion: str = "opd",
    posterior: PosteriorLike | None = None,
    batches: Iterable[Any] | None = None,
    sparsity: float = 0.8,
    target: str = "units",
    spread: str = "uniform",
    normalise: str | None = None,
    round_to: int = 1,
    min_units: int = 1,
    groups: Groups | None = None,
    masks: Mapping[str, Tensor] | None = None,
    in_place: bool = False,
    optimizer: Optimizer | None = None,
    spam: "SpaM | None" = None,
    forward: Forward | None = None,
    **scoring: Any,
) -> nn.Module:
    """A smaller dense network: units that matter least are removed, and with them everything that made or read them.

    Example:
        >>> small = shaver.compact(model, example=x, criterion="opd", posterior=spam.posterior, sparsity=0.8)
        >>> half = shaver.compact(model, example=x, criterion="magnitude", sparsity=0.5, target="flops")

    For networks that are to be compacted, train SpaM with ``prior="unit"``: one precision for each unit switches whole
    units off, where one for each weight thins all of them.

    Args:
        model: The network. A copy is made small, unless ``in_place``.
        example: An input: to find what is coupled, to check the result on, and to count FLOPs. A tensor, a tuple of
            positional or a dict of keyword arguments.
        criterion: ``"opd"``, ``"magnitude"``, ``"snip"``, ``"grasp"``, ``"synflow"``, ``"random"`` or another, summed
            over all that belongs to a unit.
        posterior: For OPD and OBD.
        batches: For the criteria that need data.
        sparsity: The share of the target that goes, in [0, 1).
        target: ``"units"``, ``"parameters"``, ``"flops"`` or ``"latency"``.
        spread: ``"uniform"`` takes the same share of each group, ``"global"`` lets widths come out freely.
        normalise: Under ``"global"``; see :class:`shaver.structure.Choosing`, except that ``None`` is ``"none"``
            for SynFlow, whose order of removal is global already.
        round_to: Widths become multiples of this.
        min_units: Each group keeps at least so many units.
        groups: What may go, from :func:`shaver.structure.find_groups`; found here if left out. The outputs never go,
            residual streams only if asked for there.
        masks: Remove just the units that these masks took, such as ``history.masks`` after gradual pruning; criterion,
            sparsity and the options of the choice then have no say.
        in_place: Change the network itself.
        optimizer: Its state follows, so that training goes on without a jump; needs ``in_place``.
        spam: Its prior and curvature follow; needs ``in_place``.
        forward: ``forward(model, batch)`` for batches (and then an example) of another layout.
        **scoring: Further arguments of :func:`shaver.score`, such as ``likelihood`` and ``seed``.

    Returns:
        The small network; :func:`shaver.structure.compact_with_report` also tells what was done.

    Raises:
        ValueError: An option is out of range, or the target is out of reach; the network is as it was.
    """
    options = dict(locals())
    scoring = options.pop("scoring")
    return compact_with_report(**options, **scoring).model


def compact_with_report(
    model: nn.Module,
    example: Example,
    *,
    criterion: str = "opd",
    posterior: PosteriorLike | None = None,
    batches: Iterable[Any] | None = None,
    sparsity: float = 0.8,
    target: str = "units",
    spread: str = "uniform",
    normalise: str | None = None,
    round_to: int = 1,
    min_units: int = 1,
    groups: Groups | None = None,
    masks: Mapping[str, Tensor] | None = None,
    in_place: bool = False,
    optimizer: Optimizer | None = None,
    spam: "SpaM | None" = None,
    forward: Forward | None = None,
    **scoring: Any,
) -> CompactReport:
    """:func:`compact` with the same arguments, and what it did: widths, parameters, bytes, FLOPs before and after.

    Example:
        >>> report = compact_with_report(model, x, criterion="magnitude", sparsity=0.5)    # doctest: +SKIP
        >>> print(report)                                                                  # doctest: +SKIP
        >>> small = report.model                                                           # doctest: +SKIP
    """
    if normalise is None and criterion == "synflow":
        normalise = "none"
    how = Choosing(target, spread, normalise, round_to, min_units)
    check_sparsity(sparsity)
    if groups is None:
        groups = find_groups(model, example, forward=forward)
    if masks is not None:
        chosen = _masked(groups, masks)
    else:
        if criterion == "synflow":
            scoring = {"spread": spread} | ({"example": example} if batches is None else {}) | scoring
        if forward is not None:
            scoring = {"forward": forward} | scoring
        scores = score_units(model, groups, criterion, posterior=posterior, batches=batches, **scoring)
        chosen = Chooser(model, groups, how, example).choose(scores, sparsity)
    before = cost(model, example, latency=False)
    done = remove_units(
        model,
        groups,
        chosen.kept,
        example,
        forward=forward,
        mask=masks is None,
        in_place=in_place,
        optimizer=optimizer,
        spam=spam,
    )
    return CompactReport(done.model, groups, chosen, before, cost(done.model, example, latency=False))


def _masked(groups: Groups, masks: Mapping[str, Tensor]) -> Chosen:
    kept = kept_units(groups, masks)
    empty = [name for name, keep in kept.items() if not bool(keep.any())]
    if empty:
        raise ValueError(f"the masks leave nothing of {', '.join(empty)}: no network can be made of what is left.")
    share = 1 - sum(int(k.sum()) for k in kept.values()) / sum(len(k) for k in kept.values())
    return Chosen(kept, "units", None, share)
