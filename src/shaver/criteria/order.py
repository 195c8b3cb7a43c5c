"""The ``count`` lowest values, and the best of each group of neighbours; ties are broken by position."""

import math

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def lowest(values: NDArray[np.floating], count: int, threshold: float | None = None) -> NDArray[np.bool_]:
    """A mask of the ``count`` lowest values, without NaN. Of equal values, those at the first positions are chosen.

    ``threshold`` is the ``count``-th lowest value, if it is known already.
    """
    if count == 0:
        return np.zeros(len(values), dtype=bool)
    if threshold is None:
        threshold = np.partition(values, count - 1)[count - 1]
    below: NDArray[np.bool_] = values < threshold
    equal = np.flatnonzero(values == threshold)
    below[equal[: count - int(np.count_nonzero(below))]] = True
    return below


def best_of_each(values: Tensor, kept: int, of: int) -> Tensor:
    """A mask of the ``kept`` highest of every ``of`` neighbours along the last dimension.

    The last group may be shorter, r < ``of``; it keeps ⌈r · kept / of⌉.
    """
    whole = values.shape[-1] - values.shape[-1] % of
    pieces = []
    for part, group in ((values[..., :whole], of), (values[..., whole:], values.shape[-1] - whole)):
        if part.numel():
            piece = part.reshape(*part.shape[:-1], -1, group)
            removed = piece.argsort(dim=-1, stable=True)[..., : group - math.ceil(group * kept / of)]
            pieces.append(torch.ones_like(piece, dtype=torch.bool).scatter_(-1, removed, False).flatten(-2))
    return torch.cat(pieces, -1) if pieces else torch.ones_like(values, dtype=torch.bool)
