"""Scores for pruning with repair: what removing a weight costs after the rest of its row has compensated for it."""

from collections.abc import Iterable, Iterator
from contextlib import closing
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from shaver.batches import Forward
from shaver.criteria import Scores
from shaver.measure.evaluating import evaluating
from shaver.repairing.calibration import calibration_list, call
from shaver.repairing.conditional import removal_damage
from shaver.repairing.moments import Moments, sequential_moments
from shaver.repairing.sites import Site, make_plan, parameters_of
from shaver.repairing.views import weight_of

#: Damping as a share of the mean squared input (of its variance, for scores), where no posterior gives δ.
DAMPING = 0.01


def output_damage(model: nn.Module, batches: Iterable[Any], *, forward: Forward | None = None) -> Scores:
    """θ² / (A⁻¹)_ii of each weight, as a share of its layer's output variance.

    A is the covariance of the layer's inputs. This is the rise of the squared error of the outputs when the weight is
    removed and the others of its row are repaired (optimal brain surgery, Hassibi and Stork, 1992). Divided by the
    variance of all outputs of the layer, layers of different scales can be ranked together.

    Use it for networks without BatchNorm: on LeNet (MNIST and FashionMNIST) it was better than magnitude at every
    sparsity. With BatchNorm, magnitude was better (ResNet-20 on CIFAR-10).

    Example:
        >>> scores = shaver.repairing.output_damage(model, loader)
        >>> shaver.prune(model, scores, sparsity=0.95, calibration=loader)

    Args:
        model: The network; not changed.
        batches: Unlabelled inputs, as for :func:`shaver.repair`.
        forward: ``forward(model, batch)`` for batches of another layout.

    Returns:
        Scores of all weights that can be repaired.
    """
    scores: dict[str, Tensor] = {}
    for site, moments in dense_moments(model, batches, forward):
        weight = site.weight(model).double()
        damage = torch.empty_like(weight)
        for group, second in enumerate(moments.second):
            sums = second[:-1, -1]
            covariance = (second[:-1, :-1] - torch.outer(sums, sums) / moments.rows) / moments.rows
            squares = covariance.diagonal().mean().clamp_min(1e-30)
            damage[group] = 2 * removal_damage(covariance, DAMPING * squares)
        share = weight.square() * damage * moments.rows / moments.variance.sum().clamp_min(1e-30)
        parameter = parameters_of(model)[site.parameter]
        if site.rows is None:
            scores[site.parameter] = weight_of(site.owner(model), share, parameter.shape).to(parameter.dtype)
        else:
            whole = scores.setdefault(site.parameter, torch.zeros_like(parameter).detach())
            whole[site.rows] = share[0].to(parameter.dtype)
    return Scores(scores, degree=2)


def dense_moments(
    model: nn.Module, batches: Iterable[Any], forward: Forward | None = None
) -> Iterator[tuple[Site, Moments]]:
    """The moments of every weight that can be repaired, in the order of the forward pass. The network stays as is."""
    data = calibration_list(batches)
    present, twin = deepcopy(model), deepcopy(model)

    def run(network: nn.Module, batch: Any) -> Any:
        return call(network, batch, forward)

    with evaluating(present, twin), torch.random.fork_rng(devices=[]):
        plan = make_plan(twin, lambda: run(twin, data[0]), [])
        with closing(sequential_moments(plan, present, twin, data, run)) as stops:
            for site, moments in stops:
                if isinstance(site, Site) and isinstance(moments, Moments):
                    yield site, moments
