"""From scores to masks: one sort, any number of sparsities, exact counts."""

import math
from collections.abc import Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shaver.criteria.order import best_of_each, lowest
from shaver.curvature.blocks import at_least_float32
from shaver.naming import check_count
from shaver.pruning.masks import Masks

_Array = NDArray[np.floating]


class Ranking:
    """The order in which weights are removed; gives masks at any sparsity.

    Example:
        >>> ranking = Ranking({"weight": torch.arange(10.0)})
        >>> [ranking.at(sparsity).kept for sparsity in (0.2, 0.5, 0.9)]
        [8, 5, 1]

    Weights with equal scores are removed in the order of their position: earlier parameters first, then earlier
    entries. So the weights kept at a higher sparsity are a subset of those kept at a lower one.

    Args:
        scores: One score tensor per prunable parameter; the lowest are removed first.
        scope: ``"global"`` ranks all weights together; ``"layer"`` removes the same share of each parameter.
        cap: The largest share that any parameter may lose; more is removed elsewhere instead.
        minimum: Each parameter keeps at least this many weights, or all if it has fewer.

    Raises:
        ValueError: A score is NaN, or an option is out of range.
    """

    def __init__(
        self, scores: Mapping[str, Tensor], *, scope: str = "global", cap: float = 1.0, minimum: int = 0
    ) -> None:
        check_scores(scores)
        self._names, self._shapes = list(scores), [scores[name].shape for name in scores]
        self._devices = [scores[name].device for name in scores]
        layers = [_as_array(scores[name]) for name in scores]
        self._sizes = [len(layer) for layer in layers]
        self.total = sum(self._sizes)
        self.scope = scope
        check_limits(cap, minimum)
        protected = [min(size, max(minimum, math.ceil((1 - cap) * size - 1e-9))) for size in self._sizes]
        self._limits = [size - count for size, count in zip(self._sizes, protected, strict=True)]
        if scope == "global":
            self._open = _unprotected(layers, protected) if any(protected) else None
            flat = np.concatenate(layers)
            self._pools = [flat if self._open is None else flat[self._open]]
        else:
            self._open = None
            self._pools = layers
        self._sorted = [np.sort(pool) for pool in self._pools]

    @property
    def limit(self) -> float:
        """The highest sparsity that the cap and the minimum allow."""
        return sum(self._limits) / self.total

    def at(self, sparsity: float) -> Masks:
        """The masks that remove ``round(sparsity · total)`` weights."""
        return self.removing(round(check_sparsity(sparsity) * self.total))

    def removing(self, count: int) -> Masks:
        """The masks that remove exactly ``count`` weights.

        Raises:
            ValueError: The cap and the minimum allow fewer.
        """
        if count > sum(self._limits):
            raise ValueError(
                f"a sparsity of {count / self.total:.6g} is out of reach: with the cap and the minimum kept in each "
                f"layer at most {self.limit:.6g} can be removed."
            )
        if self.scope == "global":
            removed = _cut(self._pools[0], self._sorted[0], count)
            if self._open is not None:
                whole = np.zeros(self.total, dtype=bool)
                whole[self._open] = removed
                removed = whole
            parts = np.split(~removed, np.cumsum(self._sizes)[:-1])
        else:
            shares = share_out(count, self._sizes, self._limits)
            parts = [~_cut(pool, order, k) for pool, order, k in zip(self._pools, self._sorted, shares, strict=True)]
        return Masks(
            {
                name: torch.from_numpy(part).reshape(shape).to(device)
                for name, part, shape, device in zip(self._names, parts, self._shapes, self._devices, strict=True)
            }
        )


def n_of_m(scores: Mapping[str, Tensor], kept: int, of: int, input_dims: Mapping[str, int]) -> Masks:
    """Keep the ``kept`` best of every ``of`` consecutive weights along the input dimension.

    The last group of a row may be shorter, r < ``of``; it keeps ⌈r · kept / of⌉. So a kernel with one input channel is
    not pruned. Ties are broken by position.
    """
    check_scores(scores)
    masks = {}
    for name, values in scores.items():
        best = best_of_each(values.movedim(input_dims[name], -1), kept, of)
        masks[name] = best.movedim(-1, input_dims[name]).contiguous()
    return Masks(masks)


def check_sparsity(sparsity: object) -> float:
    """Return a share in [0, 1) as a float, or raise a ``ValueError`` that suggests what was probably meant."""
    if isinstance(sparsity, bool) or not isinstance(sparsity, int | float) or not 0 <= sparsity < 1:
        hint = ""
        if isinstance(sparsity, int | float) and 1 < sparsity < 100:
            hint = f" {sparsity:g} % is {sparsity / 100:g}."
        raise ValueError(f"sparsity is the share of weights to remove, in [0, 1), not {sparsity!r}.{hint}")
    return float(sparsity)


def check_scores(scores: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` if there are no scores, or if some are NaN; the message names the parameter."""
    for name, values in scores.items():
        if not isinstance(values, Tensor):
            raise TypeError(f"the scores of {name!r} are a {type(values).__name__}, not a tensor.")
    if not scores or not any(values.numel() for values in scores.values()):
        raise ValueError("there are no scores: nothing to prune.")
    for name, values in scores.items():
        if bool(values.isnan().any()):
            raise ValueError(f"{int(values.isnan().sum())} scores of {name!r} are NaN; they cannot be ranked.")


def share_out(count: int, sizes: Sequence[int], limits: Sequence[int]) -> list[int]:
    """Split ``count`` exactly over layers in proportion to their sizes, none above its limit.

    The excess of a layer at its limit is split over the others, again in proportion. The last whole weights go to the
    largest remainders, earlier layers first.
    """
    exact = [0.0] * len(sizes)
    open_layers, left = list(range(len(sizes))), float(count)
    while open_layers:
        share = left / sum(sizes[i] for i in open_layers)
        full = [i for i in open_layers if share * sizes[i] >= limits[i]]
        if not full:
            for i in open_layers:
                exact[i] = share * sizes[i]
            break
        for i in full:
            exact[i] = limits[i]
            left -= limits[i]
        open_layers = [i for i in open_layers if i not in full]
    # A share of 3.0000000004 is three: rounding errors must not add a weight.
    shares = [min(math.floor(value + 1e-6), limit) for value, limit in zip(exact, limits, strict=True)]
    by_remainder = sorted(range(len(sizes)), key=lambda i: shares[i] - exact[i])
    while (missing := count - sum(shares)) > 0:
        for i in [i for i in by_remainder if shares[i] < limits[i]][:missing]:
            shares[i] += 1
    return shares


def _cut(pool: _Array, order: _Array, count: int) -> NDArray[np.bool_]:
    return lowest(pool, count, order[count - 1]) if count else np.zeros(len(pool), dtype=bool)


def check_limits(cap: float, minimum: int) -> bool:
    """Refuse a cap or a minimum out of range. Returns whether they protect any weight."""
    if not isinstance(cap, int | float) or not 0 < cap <= 1:
        raise ValueError(f"cap is the largest share a layer may lose, in (0, 1], not {cap!r}.")
    check_count("minimum, how many weights each layer keeps,", minimum, 0)
    return (cap, minimum) != (1, 0)


def _unprotected(layers: list[_Array], protected: list[int]) -> NDArray[np.intp]:
    """Flat positions of the weights that are not among the protected best of their layer."""
    parts, offset = [], 0
    for layer, count in zip(layers, protected, strict=True):
        free = lowest(layer, len(layer) - count)
        parts.append(np.flatnonzero(free) + offset)
        offset += len(layer)
    return np.concatenate(parts)


def _as_array(values: Tensor) -> _Array:
    flat = values.detach().reshape(-1).cpu()
    array: _Array = (at_least_float32(flat) if flat.is_floating_point() else flat.double()).numpy()
    return array
