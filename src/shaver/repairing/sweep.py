"""A sweep over the columns of a wide layer: removes weights from left to right, and later columns compensate for them.

With P = A + Λ, the weights to the right of column j have the precision P_{j:}. Removing weight j moves them by

    θ_{j:} ← θ_{j:} − θ_j / [P_{j:}⁻¹]_jj · [P_{j:}⁻¹]_j ,     at the cost of   ½ θ_j² / [P_{j:}⁻¹]_jj .

All rows share the inverses: P⁻¹ = UᵀU with an upper triangular U gives [P_{j:}⁻¹]_j = U_jj U_j. This is the order of
SparseGPT (Frantar and Alistarh, 2023). Columns to the left of j no longer move. The result is therefore the exact
conditional mean where every row loses its leftmost columns, and an approximation otherwise: conjugate gradients
(:func:`shaver.repairing.conditional.conjugate_gradients`) find the exact one for the chosen weights. On correlated
inputs of 1,024 dimensions at 50 and 80 %, the squared error of the sweep alone was 1.5 and 1.7 times as large.
"""

import torch
from torch import Tensor

from shaver.criteria.order import best_of_each
from shaver.repairing.damage import DAMPING

#: Columns whose later columns are updated at once.
BLOCK = 128


def sweep(
    weight: Tensor,
    moment: Tensor,
    *,
    sparsity: float | None = None,
    pattern: tuple[int, int] | None = None,
    damping: float | Tensor = DAMPING,
    block: int = BLOCK,
) -> tuple[Tensor, Tensor]:
    """Remove weights column by column and let the columns to the right compensate for them.

    Use it for layers of thousands of inputs. It factorises one matrix for all rows, where the exact solution
    (:func:`shaver.repairing.conditional.conditional_mean`) factorises one for each row.

    Example:
        >>> x = torch.randn(400, 64)
        >>> pruned, kept = sweep(torch.randn(16, 64), x.T @ x / 400, pattern=(2, 4))
        >>> int(kept.sum()), bool((pruned[~kept] == 0).all())
        (512, True)

    Args:
        weight: ``(rows, inputs)``; not changed.
        moment: Second moment A of the inputs, ``(inputs, inputs)``, of any scale. It may be singular.
        sparsity: The share of weights that is removed from each block of columns: those of the lowest cost.
        pattern: ``(n, m)`` keeps the n weights of the highest cost of every m neighbours in a row.
        damping: A number is a share of the mean squared input. A tensor is Λ itself, one entry per input.
        block: Columns per block.

    Returns:
        The weight in its own dtype, and which weights are kept.

    Raises:
        ValueError: Not exactly one of ``sparsity`` and ``pattern`` is given, shapes do not fit, or the moment
            is not finite or has a negative eigenvalue.
    """
    _check_choice(sparsity, pattern)
    rows, inputs = weight.shape
    if moment.ndim == 2 and len(moment) == moment.shape[1] != inputs:
        raise ValueError(f"the weight has {inputs} inputs, and the moment has {len(moment)}.")
    is_double = weight.dtype == moment.dtype == torch.float64
    upper = inverse_factor(moment, damping, torch.float64 if is_double else torch.float32)
    result = weight.to(upper.dtype, copy=True)
    kept = torch.ones_like(weight, dtype=torch.bool)
    width = block if pattern is None else max(pattern[1], block - block % pattern[1])
    span = width if pattern is None else pattern[1]  # columns that are chosen at once
    removed_so_far = 0
    for start in range(0, inputs, width):
        stop = min(start + width, inputs)
        part, errors = result[:, start:stop], result.new_empty(rows, stop - start)
        factor = upper[start:stop, start:stop]
        for column in range(stop - start):
            place = start + column
            if column % span == 0:
                chosen = slice(place, min(place + span, inputs))
                costs = (result[:, chosen] / upper.diagonal()[chosen]).square()
                if pattern is not None:
                    kept[:, chosen] = best_of_each(costs, *pattern)
                elif sparsity is not None:
                    count = round(sparsity * rows * chosen.stop) - removed_so_far
                    removed_so_far += count
                    kept[:, chosen] = _all_but_lowest(costs, count)
            removed = ~kept[:, place]
            error = part[:, column] * removed / factor[column, column]
            part[:, column:].addr_(error, factor[column, column:], alpha=-1)
            part[:, column].masked_fill_(removed, 0)
            errors[:, column] = error
        result[:, stop:].addmm_(errors, upper[start:stop, stop:], alpha=-1)
    return result.to(weight.dtype), kept


def _check_choice(sparsity: float | None, pattern: tuple[int, int] | None) -> None:
    if (sparsity is None) == (pattern is None):
        raise ValueError(f"give one of sparsity and pattern, not {'none' if sparsity is None else 'both'} of them.")
    if sparsity is not None and not 0 <= sparsity <= 1:
        raise ValueError(f"sparsity is a share from 0 to 1, not {sparsity!r}.")
    if pattern is not None and not 0 < pattern[0] <= pattern[1]:
        raise ValueError(f"pattern is (n, m) with 0 < n <= m, such as (2, 4), not {pattern!r}.")


def _all_but_lowest(costs: Tensor, count: int) -> Tensor:
    kept = torch.ones(costs.numel(), dtype=torch.bool, device=costs.device)
    kept[costs.flatten().argsort(stable=True)[:count]] = False
    return kept.reshape(costs.shape)


def inverse_factor(moment: Tensor, damping: float | Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """The upper triangular U with UᵀU = (A + Λ)⁻¹, from one Cholesky factorisation and one triangular inverse.

    The inverse itself is never formed: in float32 it need not be positive definite. Where rounding has made A + Λ
    indefinite, the diagonal is raised tenfold from 1e-6 of its mean until the factorisation succeeds.

    Raises:
        ValueError: A has the wrong shape, is not finite, or has an eigenvalue far below zero.
    """
    size = len(moment)
    if moment.shape != (size, size):
        raise ValueError(f"the moment is a square matrix, one row per input, not of shape {tuple(moment.shape)}.")
    if not bool(moment.isfinite().all()):
        raise ValueError("the second moments of the inputs hold NaN or infinity: the data or the network are broken.")
    mean = float(moment.diagonal().double().mean()) or 1.0  # of the squared inputs; 1 where all are zero
    ridge = torch.as_tensor(damping, dtype=torch.float64, device=moment.device)
    if not isinstance(damping, Tensor):
        ridge = ridge * mean
    ridge = ridge.clamp_min(size * torch.finfo(moment.dtype).eps * mean)  # what rounding may take from the eigenvalues
    # A + Λ = M Mᵀ with an upper triangular M = U⁻¹: the ordinary factor of the flipped matrix, flipped back.
    system = moment.to(dtype or moment.dtype).flip(0, 1).contiguous()
    system.diagonal().add_(ridge.to(system).expand(size).flip(0))
    extra = 1e-6
    while True:
        factor, info = torch.linalg.cholesky_ex(system)
        if not int(info):
            break
        if extra > 1:
            raise ValueError(
                "the second moments of the inputs are not positive semidefinite; sum x xᵀ over the rows of the inputs."
            )
        system.diagonal().add_(extra * mean)
        extra *= 10
    identity = torch.eye(size, dtype=system.dtype, device=system.device)
    inverse: Tensor = torch.linalg.solve_triangular(factor, identity, upper=False)
    return inverse.flip(0, 1)
