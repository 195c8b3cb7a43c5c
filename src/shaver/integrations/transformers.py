"""Models and trainers of the transformers library."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor

from shaver.batches import targets_of

#: The label that a loss leaves out.
IGNORED = -100


def next_tokens(batch: Any) -> Tensor:
    """The targets of a causal language model's batch: at every position the label of the next.

    Such a model takes ``labels`` unshifted and shifts them itself; whoever compares its logits with targets has to
    do the same. The last position has no next token and is ignored.

    Example:
        >>> shaver.curvature.estimate(model, batches, source="ef", targets=next_tokens)
    """
    return F.pad(targets_of(batch)[:, 1:], (0, 1), value=IGNORED)
