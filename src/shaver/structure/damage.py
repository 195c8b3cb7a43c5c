"""Scores of units for compaction with repair: the cost of removing a unit after its readers have been repaired.

A layer reads the units with the weights W. With the precision P = A + Λ of each of its rows, A the second moment of its
inputs, removing the unit U and repairing the others raises the squared error of its outputs by

    Σ_j W_jU [ (P⁻¹)_UU ]⁻¹ W_jUᵀ .
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from shaver.batches import Forward
from shaver.repairing.damage import DAMPING, dense_moments
from shaver.repairing.moments import Moments
from shaver.repairing.sites import Site, parameters_of
from shaver.structure.groups import Group, Groups

#: At each step this share of the remaining units is removed, at least one.
SHARE = 1 / 32


def unit_damage(
    model: nn.Module, groups: Groups, batches: Iterable[Any], *, forward: Forward | None = None
) -> dict[str, Tensor]:
    """Score units by removing those of each group one at a time, cheapest first.

    Example:
        >>> scores = unit_damage(model, groups, loader)

    The costs of all layers that read a unit are added, each as a share of the variance of its outputs.

    Args:
        model: The network; not changed.
        groups: Its groups.
        batches: Unlabelled inputs, as for :func:`shaver.repair`.
        forward: ``forward(model, batch)`` for batches of another layout.

    Returns:
        What each unit cost when it was removed, at least as much as the units removed before it.

    Raises:
        ValueError: No layer that reads a group can be repaired.
    """
    readers: dict[str, list[UnitReader]] = {name: [] for name in groups}
    for site, moments in dense_moments(model, batches, forward):
        for name, group in groups.items():
            readers[name] += _readers(model, group, site, moments)
    silent = [name for name, found in readers.items() if not found]
    if silent:
        raise ValueError(
            f"the damage of removing units of {', '.join(silent)} is not known: no linear layer or convolution reads "
            'them. Use criterion="magnitude", or leave these groups out.'
        )
    return {name: eliminate(groups[name].units, readers[name])[0] for name in groups}


class UnitReader:
    """A layer that reads the units of a group: its weights, repaired after each removal, and P⁻¹.

    Args:
        weight: ``(outputs, inputs)``.
        second: Second moment of the inputs, with the constant's last.
        columns: ``(units, k)``: the inputs that belong to each unit.
        constant: Whether a constant input, such as a bias, takes part in the repair.
        ridge: Λ; without it, :data:`DAMPING` of the mean squared input.
    """

    def __init__(
        self, weight: Tensor, second: Tensor, columns: Tensor, *, constant: bool = False, ridge: float | None = None
    ) -> None:
        size = weight.shape[1] + constant
        precision = second[:size, :size].clone()
        mean = float(precision.diagonal()[: weight.shape[1]].mean().clamp_min(1e-30))
        ridge = DAMPING * mean if ridge is None else ridge
        precision.diagonal()[: weight.shape[1]].add_(ridge)
        precision.diagonal().add_(1e-9 * ridge)
        self._inverse = torch.cholesky_inverse(torch.linalg.cholesky(precision))
        self._weight = torch.cat([weight, weight.new_zeros(len(weight), int(constant))], 1)
        self._columns = columns
        self._inputs = weight.shape[1]

    @property
    def weight(self) -> Tensor:
        """The weights as they are now."""
        return self._weight[:, : self._inputs]

    def damage(self, units: Tensor) -> Tensor:
        """The cost of removing each of these units alone."""
        columns = self._columns[units]
        blocks = self._inverse[columns.unsqueeze(2), columns.unsqueeze(1)]
        weight = self._weight[:, columns].permute(1, 2, 0)
        costs: Tensor = (weight * torch.linalg.solve(blocks, weight)).sum((1, 2))
        return costs

    def remove(self, units: Tensor) -> None:
        """Remove units; the other weights compensate for them."""
        gone = self._columns[units].flatten()
        share = torch.linalg.solve(self._inverse[gone][:, gone], self._inverse[gone])
        self._weight = self._weight - self._weight[:, gone] @ share
        self._inverse = self._inverse - self._inverse[:, gone] @ share


def _readers(model: nn.Module, group: Group, site: Site, moments: Moments) -> list[UnitReader]:
    """The site as a reader of the group, once for each group of a grouped convolution."""
    found = []
    for piece in group.slices:
        if piece.role != "reads" or piece.tensor != site.parameter:
            continue
        shape = parameters_of(model)[piece.tensor].shape
        unit = torch.full((shape[piece.dim],), -1)
        unit[piece.index.cpu()] = torch.arange(group.units).unsqueeze(1)
        form = [-1 if dim == piece.dim else 1 for dim in range(len(shape))]
        which = site.matrix(model, unit.reshape(form).expand(shape))
        weight = site.weight(model).double() / float(moments.variance.sum().clamp_min(1e-30)) ** 0.5
        constant = site.bias(model) is not None or site.norm is not None
        for part, weights, second in zip(which, weight, moments.second, strict=True):
            if bool((part == part[:1]).all()) and bool((part[0] >= 0).any()):
                order = part[0].argsort(stable=True)[int((part[0] < 0).sum()) :]
                found.append(UnitReader(weights, second, order.reshape(group.units, -1), constant=constant))
    return found


def eliminate(units: int, readers: Sequence[UnitReader], keep: int = 0) -> tuple[Tensor, Tensor]:
    """Each unit's cost at its removal, and which are left; ``keep`` of them stay and have no cost."""
    scores, alive, highest = torch.zeros(units, dtype=torch.float64), torch.arange(units), 0.0
    while len(alive) > keep:
        damage = torch.stack([reader.damage(alive) for reader in readers]).sum(0).cpu()
        order = damage.argsort(stable=True)
        chosen = order[: min(len(alive) - keep, max(1, int(SHARE * len(alive))))]
        scores[alive[chosen]] = damage[chosen].clamp_min(highest)
        highest = float(scores[alive[chosen]].max())
        for reader in readers:
            reader.remove(alive[chosen])
        alive = alive[order[len(chosen) :].sort().values]
    return scores, alive
