"""H from several processes: each has seen its own samples, and the sum over all of them is wanted."""

from shaver.curvature.blocks import Curvature, DiagonalBlock, KroneckerBlock
from shaver.ranks import Ranks


def over_ranks(curvature: Curvature, ranks: Ranks) -> Curvature:
    """The curvature of all ranks' samples together; changes the blocks in place. A collective.

    A diagonal is a sum, and so is G of a Kronecker block; A is a mean and is weighed by the samples behind it.
    """
    if not ranks:
        return curvature
    own = curvature.data_size
    size, log_likelihood = ranks.total(own, curvature.log_likelihood)
    tensors = []
    for _, block in curvature:
        if isinstance(block, KroneckerBlock):
            block.A.mul_(own / size)
            tensors += [block.A, block.G]
        elif isinstance(block, DiagonalBlock):
            tensors.append(block.values)
    ranks.sum_(tensors)
    curvature.data_size, curvature.log_likelihood = int(size), log_likelihood
    return curvature
