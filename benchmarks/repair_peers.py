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

import torch
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
    rule = {"sparsegpt": sparsegpt, "wanda": wanda}[method]
    with evaluating(model):
        twin = copy.deepcopy(model)
        plan = make_plan(twin, lambda: twin(batches[0]), [])
        with closing(sequential_moments(plan, model, twin, batches, lambda network, x: network(x))) as stops:
            for site, moments in stops:
                if isinstance(site, Site) and isinstance(moments, Moments):
                    weight = site.weight(model).double()
                    share = sparsity if isinstance(sparsity, float) else sparsity[site.parameter]
                    pruned = [rule(w, h[:-1, :-1], share) for w, h in zip(weight, moments.second, strict=True)]
                    site.write(model, torch.stack(pruned), None)
                elif isinstance(site, str) and isinstance(moments, Statistics):
                    set_statistics(site, norms_of(model)[site], moments.mean, moments.variance)


def sparsegpt(weight: Tensor, hessian: Tensor, sparsity: float, *, block: int = 128, damping: float = 0.01) -> Tensor:
    """One weight matrix, ``(rows, columns)``, with H = X Xᵀ."""
    weight, hessian = weight.clone(), hessian.clone()
    dead = hessian.diagonal() == 0
    hessian[dead, dead] = 1
    weight[:, dead] = 0
    hessian += damping * hessian.diagonal().mean() * torch.eye(len(hessian), dtype=hessian.dtype)
    upper = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(hessian)), upper=True)
    for start in range(0, weight.shape[1], block):
        stop = min(start + block, weight.shape[1])
        part = weight[:, start:stop]
        scores = part.square() / upper.diagonal()[start:stop].square()
        count = round(sparsity * scores.numel())
        removed = torch.zeros_like(scores, dtype=torch.bool)
        removed.view(-1)[scores.flatten().argsort()[:count]] = True
        errors = torch.zeros_like(part)
        for column in range(stop - start):
            place = start + column
            error = torch.where(removed[:, column], part[:, column], 0.0) / upper[place, place]
            part[:, column:] -= error.unsqueeze(1) * upper[place, place:stop]
            part[removed[:, column], column] = 0
            errors[:, column] = error
        weight[:, stop:] -= errors @ upper[start:stop, stop:]
    return weight


def wanda(weight: Tensor, hessian: Tensor, sparsity: float) -> Tensor:
    """One weight matrix; the lowest of each row are removed."""
    scores = weight.abs() * hessian.diagonal().sqrt()
    removed = scores.argsort(1)[:, : round(sparsity * weight.shape[1])]
    return weight.scatter(1, removed, 0.0)


def check() -> None:
    """Both methods against their definitions, written out column by column with explicit inverses, in float64."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(60, 8, generator=generator, dtype=torch.float64) @ torch.randn(
        8, 8, generator=generator, dtype=torch.float64
    )
    hessian = x.T @ x
    damped = hessian + 0.01 * hessian.diagonal().mean() * torch.eye(8, dtype=torch.float64)
    for sparsity in (1 / 8, 0.5, 0.75):
        weight = torch.randn(6, 8, generator=generator, dtype=torch.float64)
        inverses = [torch.linalg.inv(damped[j:, j:]) for j in range(8)]  # of what is left at column j
        scores = weight.square() / torch.stack([inverse[0, 0] for inverse in inverses])
        removed = torch.zeros(48, dtype=torch.bool)
        removed[scores.flatten().argsort()[: round(48 * sparsity)]] = True
        expected = weight.clone()
        for row, gone in enumerate(removed.reshape(6, 8)):
            for j in gone.nonzero()[:, 0].tolist():
                expected[row, j:] -= expected[row, j] / inverses[j][0, 0] * inverses[j][0]
        torch.testing.assert_close(sparsegpt(weight, hessian, sparsity), expected)
        metric = weight.abs() * x.norm(dim=0)
        for row, found in zip(metric, wanda(weight, hessian, sparsity), strict=True):
            assert set(row.argsort()[: round(8 * sparsity)].tolist()) == set((found == 0).nonzero()[:, 0].tolist())


if __name__ == "__main__":
    check()
    print("SparseGPT and Wanda agree with their definitions")
