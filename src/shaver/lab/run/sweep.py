"""One trained network, pruned by many criteria to many sparsities, each time from the dense one and measured."""

import copy
import time
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor, nn

from shaver.criteria import PosteriorLike, score
from shaver.measure import cost, quality
from shaver.pruning import prune

#: The sparsities of the paper's figures.
SPARSITIES = (0.20, 0.40, 0.60, 0.70, 0.75, 0.80, 0.85, 0.90, 0.95, 0.99)
#: The criterion of the row that describes the dense network.
DENSE = "dense"

Row = dict[str, Any]


def sweep(
    model: nn.Module,
    test: Iterable[Any],
    *,
    criteria: Sequence[str],
    sparsities: Sequence[float] = SPARSITIES,
    posterior: PosteriorLike,
    batches: Iterable[Any],
    example: Tensor,
    seed: int = 0,
) -> Iterator[list[Row]]:
    """Yield the dense network's row, then the rows of each criterion as they are measured.

    Args:
        model: The trained network; it is copied, never changed.
        test: Batches for the quality.
        criteria: Names for :func:`shaver.score`.
        sparsities: Shares of the prunable weights to remove.
        posterior: For the criteria that need one.
        batches: Training batches, for the criteria that need data.
        example: An input, for the cost.
        seed: Of the random criterion.

    Yields:
        Rows with ``criterion``, ``sparsity`` (asked), ``achieved``, ``score_seconds``, the quality and the cost.
    """
    yield [{"criterion": DENSE, "sparsity": 0.0, "achieved": 0.0, **measure(model, test, example)}]
    for name in criteria:
        began = time.perf_counter()
        scores = score(model, name, posterior=posterior, batches=batches, seed=seed)
        seconds = time.perf_counter() - began
        rows = []
        for sparsity in sparsities:
            network = copy.deepcopy(model)
            pruned = prune(network, scores, sparsity)
            reached = {"criterion": name, "sparsity": sparsity, "achieved": pruned.achieved, "score_seconds": seconds}
            rows.append(reached | measure(network, test, example))
        yield rows


def measure(model: nn.Module, test: Iterable[Any], example: Tensor, *, latency: bool = False) -> Row:
    """Quality on ``test`` and cost, as one flat row."""
    return quality(model, test).as_dict() | cost(model, example, latency=latency).as_dict()
