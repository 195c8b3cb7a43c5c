"""Second moments of layer inputs, and their products with the dense network's outputs, summed over batches."""

from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from shaver.curvature.blocks import at_least_float32
from shaver.repairing.lockstep import Lane, lanes, visiting
from shaver.repairing.sites import RepairPlan, Site, bias_of, site_input, site_output
from shaver.repairing.views import input_rows, output_rows

#: Rows of inputs per layer beyond which a convolution's positions are thinned out.
ROWS = 50_000
#: Entries of a layer's inputs up to which they are kept for a fit to what a ReLU lets through: 256 MB in float32.
ENTRIES = 2**26


@dataclass
class Moments:
    """What the least-squares fit of one site needs, in float64, each with a leading dimension of groups.

    Attributes:
        second: Σ x xᵀ of the present network's inputs, the last entry of x being the constant 1.
        cross: Σ y xᵀ with the dense network's outputs y, ``(groups, outputs, inputs + 1)``.
        energy: Σ y² of each output.
        rows: How many rows were summed.
        pairs: The rows themselves, x and y of each batch, where a ReLU takes the outputs and there are not too many.
    """

    second: Tensor
    cross: Tensor
    energy: Tensor
    rows: int
    pairs: list[tuple[Tensor, Tensor]] = field(default_factory=list)

    def pairs_of(self, group: int) -> list[tuple[Tensor, Tensor]]:
        """The rows of one group."""
        return [(x[group], y[group]) for x, y in self.pairs]

    def error(self, weight: Tensor) -> Tensor:
        """Σ (y − W x)² of each output, ``(groups, outputs)``, for weights with the bias as their last column."""
        fitted = (weight @ self.second * weight).sum(-1)
        return (self.energy - 2 * (self.cross * weight).sum(-1) + fitted).clamp_min(0)

    @property
    def variance(self) -> Tensor:
        """Σ (y − mean)² of each output."""
        return (self.energy - self.cross[..., -1].square() / self.rows).clamp_min(0)


@dataclass
class Statistics:
    """Mean and variance of each channel at the input of a norm."""

    mean: Tensor
    variance: Tensor


def sequential_moments(
    plan: RepairPlan,
    model: nn.Module,
    reference: nn.Module,
    batches: Sequence[Any],
    call: Callable[[nn.Module, Any], object],
) -> Generator[tuple[Site | str, Moments | Statistics]]:
    """The moments of one stop after the other, in the order of the forward pass.

    Whatever the caller changes in the model between two stops is in force for the stops after it: each site comes
    before its last use, each norm before its own.

    Raises:
        ValueError: The batches hold NaN, or the forward passes of batches or networks take different ways.
    """
    thin = {stop: _thinning(stop, len(batches)) for stop in plan.stops if isinstance(stop, Site)}

    def place(lane: Lane, site: Site) -> tuple[int, int]:
        """The step between positions, and a first position that changes with the batch."""
        step = thin.get(site, 1)
        return step, (lane.number * 7919) % step

    def inputs(lane: Lane, path: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any], _: Any) -> None:
        if isinstance(module, _BatchNorm):
            lane.stop(path, args[0])
            return
        for part, site in plan.sites_at(path):
            x = site_input(module, part, args, kwargs)
            lane.stop(site, input_rows(module, x, *place(lane, site)))

    def outputs(lane: Lane, path: str, module: nn.Module, args: Any, kwargs: Mapping[str, Any], out: Any) -> None:
        for part, site in plan.sites_at(path):
            y = output_rows(module, site_output(module, part, args, kwargs, out), *place(lane, site))
            bias = bias_of(module, part)
            if bias is not None and site.bias(reference) is None:  # each user has its own, which stays
                y = y - bias.reshape(len(y), 1, -1)
            lane.stop(site, y)

    paths = [path for path in plan.paths if path not in plan.norms]
    own = [lambda batch=batch: call(model, batch) for batch in batches]
    dense = [lambda batch=batch: call(reference, batch) for batch in batches]
    sums: dict[Site | str, list[Any]] = {}
    pairs: dict[Site, list[tuple[Tensor, Tensor]]] = {}
    with (
        visiting(model, plan.paths, inputs, before=True),
        visiting(reference, paths, outputs, before=False),
        lanes(own) as present,
        lanes(dense) as twins,
    ):
        for position, stop in enumerate(plan.stops):
            for lane, twin in zip(present, twins, strict=True):
                if isinstance(stop, str):
                    found = _norm_sums(lane.advance_to(stop, stop))
                else:
                    y = at_least_float32(twin.advance_to(stop, stop.name))
                    x = at_least_float32(lane.advance_to(stop, stop.name))  # half-precision sums lose too much
                    found = _site_sums(stop, lane.number, x, y)
                    if stop.rectified and x.numel() * len(batches) <= ENTRIES:
                        pairs.setdefault(stop, []).append((x, y))
                sums[stop] = [a + b for a, b in zip(sums[stop], found, strict=True)] if stop in sums else found
            if stop in plan.stops[position + 1 :]:
                continue
            if isinstance(stop, str):
                yield stop, _statistics(*sums.pop(stop))
            else:
                second, cross, energy, rows = sums.pop(stop)
                yield stop, Moments(second, cross, energy, rows, pairs.pop(stop, []))


def _site_sums(site: Site, batch: int, x: Tensor, y: Tensor) -> list[Any]:
    """The fields of the moments of one batch, from ``second`` to ``rows``."""
    if y.shape[:2] != x.shape[:2]:
        raise ValueError(
            f"{site.name!r} has {x.shape[1]} rows of inputs, and {y.shape[1]} rows of outputs in the reference: "
            "they are different networks."
        )
    groups, rows, size = x.shape
    second = x.new_zeros(groups, size + 1, size + 1, dtype=torch.float64)
    second[:, :-1, :-1] = x.mT @ x
    second[:, -1, :-1] = second[:, :-1, -1] = x.double().sum(1)
    second[:, -1, -1] = rows
    cross = torch.cat([(y.mT @ x).double(), y.double().sum(1).unsqueeze(2)], -1)
    if not bool(second.isfinite().all() & cross.isfinite().all()):
        raise ValueError(
            f"the inputs or outputs of {site.name!r} hold NaN or infinity in calibration batch {batch}: "
            "the data or the network are broken."
        )
    return [second, cross, y.double().square().sum(1), rows]


def _norm_sums(x: Tensor) -> list[Any]:
    flat = x.transpose(0, 1).flatten(1).double()
    return [flat.sum(1), flat.square().sum(1), flat.shape[1]]


def _statistics(total: Tensor, squares: Tensor, rows: int) -> Statistics:
    mean = total / rows
    variance = (squares / rows - mean.square()).clamp_min(0)
    return Statistics(mean, variance * rows / max(rows - 1, 1))


def _thinning(site: Site, batches: int) -> int:
    if not site.spans or site.size * batches <= ROWS:
        return 1
    thin = int((site.size * batches / ROWS) ** (1 / len(site.spans)))
    return max(1, min(thin, *site.spans))
