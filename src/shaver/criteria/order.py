"""The lowest of many numbers, exactly so many, with ties in the order of position."""

import numpy as np
from numpy.typing import NDArray


def lowest(values: NDArray[np.floating], count: int, threshold: float | None = None) -> NDArray[np.bool_]:
    """Where the ``count`` lowest values are; of those equal to the highest of them, the first ones in position.

    Args:
        values: Numbers without NaN.
        count: How many.
        threshold: The ``count``-th lowest value, where it is known already.
    """
    if count == 0:
        return np.zeros(len(values), dtype=bool)
    if threshold is None:
        threshold = np.partition(values, count - 1)[count - 1]
    below: NDArray[np.bool_] = values < threshold
    equal = np.flatnonzero(values == threshold)
    below[equal[: count - int(np.count_nonzero(below))]] = True
    return below
