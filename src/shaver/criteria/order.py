"""The ``count`` lowest values; ties are broken by position."""

import numpy as np
from numpy.typing import NDArray


def lowest(values: NDArray[np.floating], count: int, threshold: float | None = None) -> NDArray[np.bool_]:
    """A mask of the ``count`` lowest values. Of equal values, those at the first positions are chosen.

    Args:
        values: The values, without NaN.
        count: The number of values to choose.
        threshold: The ``count``-th lowest value, if it is known already.
    """
    if count == 0:
        return np.zeros(len(values), dtype=bool)
    if threshold is None:
        threshold = np.partition(values, count - 1)[count - 1]
    below: NDArray[np.bool_] = values < threshold
    equal = np.flatnonzero(values == threshold)
    below[equal[: count - int(np.count_nonzero(below))]] = True
    return below
