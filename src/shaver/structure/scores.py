"""Scores of units: the scores of weights, summed over everything that belongs to a unit, S(g) = Σ S(θ_p)."""

import copy
from collections.abc import Iterable, Mapping
from itertools import combinations
from typing import Any

import torch
from torch import Tensor, nn

from shaver.criteria import PosteriorLike, needs, prunable, score
from shaver.criteria.synflow import kept_shares
from shaver.pruning.ranking import Ranking
from shaver.structure.damage import unit_damage
from shaver.structure.groups import Group, Groups, check_groups, mask_units

#: The criterion of :func:`unit_damage`.
DAMAGE = "damage"
#: Criteria that can score only weights that multiply an input; biases and norms then do not count.
_WEIGHTS_ALONE = ("wanda",)


def unit_scores(groups: Groups, scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """S(g) = Σ S(θ_p) over everything coupled to a unit, in float64: one score per unit for each group.

    A sum of OPD scores is again the posterior energy that the removal costs. A unit's rows, its bias, its norm's scale
    and shift, and the columns that read it all count; where a tensor both makes and reads a unit, the entry that does
    both counts once. Parameters without scores do not count.

    Example:
        >>> group = Group("fc", "hidden", 2, (Slice("weight", 0, torch.tensor([[0], [1]]), "makes"),))
        >>> unit_scores(Groups({"fc": group}), {"weight": torch.tensor([[1.0, 2.0], [3.0, 4.0]])})
        {'fc': tensor([3., 7.], dtype=torch.float64)}

    ``scores`` are those of the model's weights, biases and norm parameters, shaped like them.

    Raises:
        ValueError: A group has no scored parameter at all.
    """
    totals = {}
    for name, group in groups.items():
        merged = _merged(group, scores)
        if not merged:
            owned = ", ".join(dict.fromkeys(s.tensor for s in group.slices))
            raise ValueError(f"there are no scores for group {name!r}: none of {owned} was scored.")
        total = torch.zeros(group.units, dtype=torch.float64)
        for tensor, by_dim in merged.items():
            values = scores[tensor].detach().double().cpu()
            for dim, index in by_dim.items():
                along = values.transpose(0, dim).flatten(1).sum(1) if values.ndim > 1 else values
                total += along[index].sum(1)
            for (one, rows), (two, columns) in combinations(by_dim.items(), 2):
                total -= torch.stack([values.index_select(one, r).index_select(two, c).sum()
                                      for r, c in zip(rows, columns, strict=True)])  # fmt: skip
        totals[name] = total
    return totals


def score_units(
    model: nn.Module,
    groups: Groups,
    criterion: str = "opd",
    *,
    posterior: PosteriorLike | None = None,
    batches: Iterable[Any] | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """Score every unit of every group by a criterion. The units with the lowest scores are removed first.

    Example:
        >>> scores = score_units(model, groups, "opd", posterior=spam.posterior)
        >>> scores["conv1"].shape
        torch.Size([6])

    All coupled parameters count, including biases and norms. Wanda scores only weights that multiply an input, so it
    leaves those out. ``"damage"`` is what a removal costs after repair, see :func:`unit_damage`. SynFlow removes units
    in rounds and measures the flow again after each; the score is the order of removal, see :func:`synflow_units`.

    Args:
        model: The network; left as found.
        groups: Its groups.
        criterion: Any of :func:`shaver.criteria.names`, or ``"damage"``.
        posterior: For OPD and OBD.
        batches: For the criteria that need data. For ``"damage"`` they need no labels.
        **options: Further arguments of :func:`shaver.score`: ``likelihood``, ``seed``, ``forward``, ``example`` …
    """
    check_groups(groups, model)
    if criterion == "synflow":
        return synflow_units(model, groups, batches=batches, **options)
    if criterion == DAMAGE:
        if batches is None:
            raise ValueError(
                'criterion="damage" needs batches=… (calibration data for compact): inputs without labels.'
            )
        return unit_damage(model, groups, batches, forward=options.get("forward"))
    owned = {piece.tensor for group in groups.values() for piece in group.slices}
    weights = set(prunable(model)) if criterion in _WEIGHTS_ALONE else owned
    trained_alone = "posterior" in needs(criterion)  # a posterior has no entry for frozen parameters

    def counts(name: str, parameter: nn.Parameter) -> bool:
        return name in owned and name in weights and (parameter.requires_grad or not trained_alone)

    return unit_scores(groups, score(model, criterion, posterior=posterior, batches=batches, rule=counts, **options))


def synflow_units(
    model: nn.Module,
    groups: Groups,
    *,
    rounds: int = 20,
    sparsity: float = 0.95,
    spread: str = "uniform",
    **options: Any,
) -> dict[str, Tensor]:
    """Structured SynFlow: units are removed in rounds, and the flow through the remaining ones is measured again.

    After round k the share (1 − ``sparsity``)^(k / rounds) of the units remains, of each group or of all together, and
    at least one of each group, so that the flow is never cut.

    Args:
        model: The network; copied.
        groups: Its groups.
        rounds: Number of measurements.
        sparsity: The sparsity at the end of the schedule.
        spread: ``"uniform"`` takes the same share of each group in each round, ``"global"`` ranks all units together.
        **options: ``batches=`` or ``example=`` for the shape of an input, and ``forward=``.

    Returns:
        The order of removal, from 0 for the first unit to nearly 1 for the last.
    """
    shares = kept_shares(rounds, sparsity)
    network = copy.deepcopy(model)
    owned = {piece.tensor for group in groups.values() for piece in group.slices}
    options |= {"rule": lambda name, _: name in owned, "rounds": 1}
    total = sum(group.units for group in groups.values())
    kept = groups.whole
    removed: list[tuple[str, int]] = []  # in the order of removal
    for share in shares:
        flow = unit_scores(groups, score(network, "synflow", **options))
        removed_first = {name: values.masked_fill(~kept[name], -float("inf")) for name, values in flow.items()}
        ranking = Ranking(removed_first, scope="layer" if spread == "uniform" else "global", minimum=1)
        count = min(round(total * (1 - share)), round(ranking.limit * total))
        still_kept = {name: mask & kept[name] for name, mask in ranking.removing(count).items()}
        removed += _by_flow(flow, {name: kept[name] & ~still_kept[name] for name in groups})
        kept = still_kept
        mask_units(network, groups, kept).apply_(network)
    removed += _by_flow(flow, kept)
    order = {name: torch.zeros(group.units, dtype=torch.float64) for name, group in groups.items()}
    for place, (name, unit) in enumerate(removed):
        order[name][unit] = place / total
    return order


def _by_flow(flow: Mapping[str, Tensor], units: Mapping[str, Tensor]) -> list[tuple[str, int]]:
    """These units of all groups, the one with the least flow first."""
    found = [(name, unit) for name, mask in units.items() for unit in mask.nonzero().flatten().tolist()]
    return sorted(found, key=lambda at: float(flow[at[0]][at[1]]))


def _merged(group: Group, scores: Mapping[str, Tensor]) -> dict[str, dict[int, Tensor]]:
    """Tensor → dimension → positions of each unit, for the parameters that have scores; no position twice."""
    merged: dict[str, dict[int, Tensor]] = {}
    for piece in group.slices:
        if piece.tensor in scores:
            by_dim = merged.setdefault(piece.tensor, {})
            dim, index = piece.dim % scores[piece.tensor].ndim, piece.index.cpu()
            if dim in by_dim and not torch.equal(by_dim[dim], index):
                rows = [torch.unique(torch.cat(pair)) for pair in zip(by_dim[dim], index, strict=True)]
                if len({len(row) for row in rows}) > 1:
                    raise ValueError(f"two slices of {piece.tensor!r} overlap for some units and not for others.")
                index = torch.stack(rows)
            by_dim[dim] = index
    return merged
