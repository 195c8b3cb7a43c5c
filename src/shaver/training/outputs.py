"""Where the outputs are in what a model returns, if ``fit`` was given a forward function that picks them out."""

from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from shaver.batches import Forward, outputs_in
from shaver.curvature.capture import undisturbed

_UNKNOWN = (
    "SpaM cannot tell where the outputs are in what the model returns, for forward= gives none of its tensors, or they "
    'are others in training: pass spam={"outputs": lambda result: …} as well.'
)


def outputs_finder(model: nn.Module, forward: Forward, batch: Any) -> Callable[[Any], Tensor]:
    """From what the model returns to what ``forward`` makes of it, found out on a batch.

    Raises:
        TypeError: The model returns no tensor, and ``forward`` none of those that it does.
    """
    results: list[Any] = []
    handle = model.register_forward_hook(lambda module, args, result: results.append(result))
    try:
        with undisturbed(model), torch.no_grad():
            outputs = forward(model, batch)
    finally:
        handle.remove()
    result = results[-1] if results else None
    leaves, shape = tree_flatten(result)
    places = [i for i, leaf in enumerate(leaves) if leaf is outputs]
    try:
        found = outputs_in(result)
    except TypeError as error:
        if not places:
            raise TypeError(_UNKNOWN) from error
    else:
        if found is outputs or not places:
            return outputs_in

    def pick(result: Any) -> Tensor:
        leaves, now = tree_flatten(result)
        if now != shape:
            raise TypeError(_UNKNOWN)
        return cast(Tensor, leaves[places[0]])

    return pick
