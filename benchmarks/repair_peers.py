"""SparseGPT and Wanda as published, layer by layer in the order of the forward pass, for any network of `repair.py`.

Both prune every layer to the same sparsity. SparseGPT (Frantar and Alistarh, 2023) sweeps over the columns of a weight
matrix: it chooses the mask of each block of columns by w² / [H⁻¹]² and moves the error of each removed weight to the
columns after it. Wanda (Sun et al., 2024) removes the lowest |w| · ‖x‖ of each row and changes nothing else. Biases
stay as they are. Both were published for networks without BatchNorm. Here its statistics are measured again as soon as
the layers before it are pruned, so that later layers see inputs of the right scale.
"""

import copy
from collections.abc import Mapping, Sequence
from contextlib import closing
from functools import partial

import torch
from language_oneshot import check_sparsegpt, sparsegpt
from torch import Tensor, nn

from shaver.measure.evaluating import evaluating
from shaver.repairing.moments import Moments, Statistics, sequential_moments
from shaver.repairing.norms import set_statistics
from shaver.repairing.sites import Site, make_plan, norms_of


def prune_layerwise(
    model: nn.Module, batches: Sequence[Tensor], sparsity: float | Mapping[str, float], method: str
) -> None:
    """Prune every linear layer and convolution in place by ``"sparsegpt"`` or ``"wanda"``.

    Args:
        model: The network.
        batches: Calibration inputs.
        sparsity: Of every layer, or by parameter name.
        method: Which of the two.
    """
    rule = {"sparsegpt": partial(sparsegpt, pattern=None), "wanda": wanda}[method]
    with evaluating(model):
        twin = copy.deepcopy(model)
        plan = make_plan(twin, lambda: twin(batches[0]), [])
        with closing(sequential_moments(plan, model, twin, batches, lambda network, x: network(x))) as stops:
            for site, moments in stops:
                if isinstance(site, Site) and isinstance(moments, Moments):
                    weight = site.weight(model).double()
                    share = min(sparsity if isinstance(sparsity, float) else sparsity[site.parameter], 1 - 1e-9)
                    pruned = [rule(w, h[:-1, :-1], sparsity=share) for w, h in zip(weight, moments.second, strict=True)]
                    site.write(model, torch.stack(pruned), None)
                elif isinstance(site, str) and isinstance(moments, Statistics):
                    set_statistics(site, norms_of(model)[site], moments.mean, moments.variance)


def wanda(weight: Tensor, hessian: Tensor, sparsity: float) -> Tensor:
    """One weight matrix; the lowest of each row are removed."""
    scores = weight.abs() * hessian.diagonal().sqrt()
    removed = scores.argsort(1)[:, : round(sparsity * weight.shape[1])]
    return weight.scatter(1, removed, 0.0)


def check() -> None:
    """Both methods against their definitions, in float64."""
    check_sparsegpt()
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(size, 8, generator=generator, dtype=torch.float64) for size in (60, 6))
    for sparsity in (1 / 8, 0.5, 0.75):
        metric = weight.abs() * x.norm(dim=0)
        for row, found in zip(metric, wanda(weight, x.T @ x, sparsity), strict=True):
            assert set(row.argsort()[: round(8 * sparsity)].tolist()) == set((found == 0).nonzero()[:, 0].tolist())


if __name__ == "__main__":
    check()
    print("SparseGPT and Wanda agree with their definitions")
