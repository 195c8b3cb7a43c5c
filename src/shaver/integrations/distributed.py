"""Networks with sharded parameters (FSDP2): whole states for saving, masks across shards.

Nothing here is needed for ``DistributedDataParallel``: ``shaver.SpaM(ddp_model, …)`` reduces H over the ranks itself,
and every rank has the whole posterior.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shaver.criteria import prunable
from shaver.evidence import Posterior
from shaver.pruning.ranking import check_sparsity
from shaver.shards import gathered, joined, local, rows_of
from shaver.spam import SpaM


def full_state_dict(spam: SpaM) -> dict[str, Any]:
    """``spam.state_dict()`` with whole tensors, for saving. All ranks must call it; each receives the whole state.

    Example:
        >>> state = full_state_dict(spam)                       # on every rank
        >>> if dist.get_rank() == 0:
        ...     shaver.io.save_state("spam.safetensors", state)
        >>> spam.load_state_dict(shaver.io.load_state("spam.safetensors"))   # with any number of ranks
    """
    state: dict[str, Any] = gathered(spam.state_dict())
    return state


def full_posterior(spam: SpaM) -> Posterior:
    """The posterior over all weights, as in one process. All ranks must call it; each receives the whole posterior.

    Save it, or give it to :func:`shaver.score` with an unsharded copy of the network.
    """
    state: dict[str, Any] = dict(spam.posterior.state_dict())
    blocks = state["curvature"]["blocks"]
    for name, p in spam.theta.items():
        blocks[name] = {key: gathered(joined(value, p)) for key, value in blocks[name].items()}
        rows = state["theta"][name]
        for part in ("delta", "theta"):
            whole = gathered(joined(state[part][name].expand(rows.shape).contiguous(), p))
            state[part] = state[part] | {name: whole}
    return Posterior.from_state_dict(state)


@torch.no_grad()
def prune_sharded(model: nn.Module, spam: SpaM, sparsity: float) -> dict[str, Tensor]:
    """Set the weights with the lowest OPD scores S = P θ² to zero, over all ranks; each rank holds only its rows.

    The threshold is found by bisection over the bits of the scores; each rank sends one number per round. Exactly
    ``round(sparsity · weights)`` weights are removed, and ties are broken by position, as in :func:`shaver.prune`.
    All ranks must call it.

    Args:
        model: The network, as :class:`shaver.SpaM` knows it.
        spam: Provides the posterior.
        sparsity: The share of the prunable weights to remove.

    Returns:
        Parameter → mask, True where a weight is kept, sharded like the parameter.
    """
    posterior, ranks = spam.posterior, spam.ranks
    precision = posterior.precision()
    scores = {name: precision[name] * posterior.theta[name].square() for name in prunable(model)}
    wrong = sum(int((~value.isfinite()).sum()) for value in scores.values())
    total, wrong = map(int, ranks.total(sum(value.numel() for value in scores.values()), wrong))
    if wrong:
        raise FloatingPointError(f"{wrong} scores are not finite: the weights or precisions have diverged.")
    count = round(check_sparsity(sparsity) * total)
    # Scores are not negative, and floating-point numbers that are not negative are ordered as their bits are.
    bits = {n: v.contiguous().view(torch.int64 if v.element_size() == 8 else torch.int32) for n, v in scores.items()}
    low, high = -1, max((torch.iinfo(b.dtype).max for b in bits.values()), default=0)
    while high - low > 1:  # fewer than ``count`` scores are ≤ low, and at least ``count`` are ≤ high
        middle = (low + high) // 2
        (below,) = ranks.total(sum(int((b <= middle).sum()) for b in bits.values()))
        low, high = (low, middle) if below >= count else (middle, high)
    (below,) = ranks.total(sum(int((b < high).sum()) for b in bits.values()))
    left = count - int(below)  # number of weights to remove among those equal to the threshold
    ties = torch.tensor([int((b == high).sum()) for b in bits.values()])
    table = [torch.zeros_like(ties) for _ in range(ranks.size)]
    if ranks:
        dist.all_gather(table, ties, group=ranks.group)
    else:
        table = [ties]
    masks = {}
    for place, (name, b) in enumerate(bits.items()):
        keep = b > high
        for rank in range(ranks.size):
            removed = min(left, int(table[rank][place]))
            left -= removed
            if rank == ranks.rank:
                equal = b == high
                keep |= equal & (equal.reshape(-1).cumsum(0).reshape(b.shape) > removed)
        local(spam.theta[name]).mul_(keep)
        masks[name] = joined(keep, spam.theta[name])
    return masks


@torch.no_grad()
def hold_sharded(spam: SpaM, masks: dict[str, Tensor]) -> None:
    """Apply the masks of :func:`prune_sharded` again: call it after each step of fine-tuning.

    Args:
        spam: Provides the parameters.
        masks: Sharded like the parameters, or whole.
    """
    for name, mask in masks.items():
        local(spam.theta[name]).mul_(rows_of(mask, spam.theta[name]))
