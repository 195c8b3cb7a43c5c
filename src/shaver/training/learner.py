"""SpaM in a run of ``fit``: its arguments, and how the outputs are found in the model's return value."""

from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

from shaver.batches import Forward, forward_of, outputs_in
from shaver.curvature.capture import undisturbed
from shaver.likelihoods import Classification
from shaver.settings import Settings, settings_for
from shaver.spam import SpaM
from shaver.training.sources import to_device

if TYPE_CHECKING:
    from shaver.training.run import Run

_UNKNOWN = (
    "SpaM cannot find the outputs in what the model returns: forward= returns none of its tensors, or different ones "
    'in training; pass spam={"outputs": lambda result: …} as well.'
)


def attach_spam(run: "Run", asked: Mapping[str, Any]) -> SpaM:
    """Create SpaM for the network of a run. ``asked`` holds the user's options."""
    own = {"total_steps": run.epochs * run.steps_per_epoch, "seed": run.seed, "group": run.spread.ranks.group}
    if run.options.weight_decay:
        own["weight_decay"] = run.options.weight_decay
    if clash := own.keys() & asked.keys():
        raise ValueError(f"fit gives SpaM {', '.join(sorted(clash))} itself; leave it out of spam=.")
    options = {name: value for name, value in asked.items() if name in {f.name for f in fields(Settings)}}
    settings = settings_for(asked.get("structure", "diag"), asked.get("settings"), options)
    forward = run.options.forward
    if forward is not forward_of and "outputs" not in asked and settings.online:
        own["outputs"] = outputs_finder(run.model, forward, to_device(run.train.first(), run.device))
    if run.plain_loss:
        own["loss"] = "mean"
    elif not isinstance(run.likelihood, Classification):
        raise ValueError(
            "with SpaM, accumulate and amp='float16' are for classification, where the scale of the loss can be read "
            "off its gradient; use a larger batch_size or amp='bfloat16' for this likelihood."
        )
    return SpaM(run.model, run.train.data_size, likelihood=run.likelihood, **(own | dict(asked)))


def outputs_finder(model: nn.Module, forward: Forward, batch: Any) -> Callable[[Any], Tensor]:
    """A function from what the model returns to the outputs that ``forward`` returns, found on one batch."""
    results: list[Any] = []
    hook = model.register_forward_hook(lambda module, args, result: results.append(result))
    with hook, undisturbed(model), torch.no_grad():
        outputs = forward(model, batch)
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
