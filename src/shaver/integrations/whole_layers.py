"""Whole layers of a causal model: which do least harm when they are removed, and the shallower model that is left.

Layers are removed one at a time, each time the one whose absence raises the loss on the calibration text least. The
blocks after it can compensate for it: :mod:`shaver.integrations.oneshot` fits them to the dense model's hidden states.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from shaver.integrations.causal_blocks import BlockChain
from shaver.structure.transformers_models import without_weights

#: Tokens of the calibration text on which every layer is left out once for each layer that is removed.
JUDGED = 1024
#: What may differ between a block and one of the same kind that a configuration builds.
_FREE = ("training", "layer_idx", "gradient_checkpointing")


def layers_to_remove(chain: BlockChain, share: float) -> int:
    """How many layers a share is, rounded; at least one stays.

    Raises:
        ValueError: It is less than half a layer, or the model's configuration cannot express fewer layers.
    """
    count = min(round(share * len(chain)), len(chain) - 1)
    if not count:
        raise ValueError(f"a share of {share} of {len(chain)} layers is not one layer: nothing would be removed.")
    _check_expressed(chain, range(count))
    return count


@torch.no_grad()
def find_layers(
    chain: BlockChain, windows: Tensor, count: int, tried: Callable[[], None] | None = None
) -> tuple[int, ...]:
    """The numbers of the layers to remove, in increasing order; the layers are not changed.

    They are found one at a time by the loss on the first tokens of the windows. ``tried`` is called after each layer
    that was left out for trial.
    """
    model: Any = chain.model
    tokens = windows[: max(1, JUDGED // windows.shape[1])]
    removed: list[int] = []
    for _ in range(count):
        entering = _entering(chain, tokens, removed)
        losses = {}
        for number in sorted(set(range(len(chain))) - set(removed)):
            given = dict.fromkeys([*range(number + 1), *removed]) | {0: entering[number]}  # the blocks before ran once
            with passing(chain, given):
                logits = model(tokens, use_cache=False).logits[:, :-1].float()
            losses[number] = float(nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()))
            if tried is not None:
                tried()
        removed.append(min(losses, key=lambda number: losses[number]))
    return tuple(sorted(removed))


@contextmanager
def passing(chain: BlockChain, given: Mapping[int, Tensor | None]) -> Iterator[None]:
    """Bypass blocks: each returns its input, or the tensor given for it, without running."""

    def forward(tensor: Tensor | None) -> Callable[..., Any]:
        def give(*args: Any, **kwargs: Any) -> Any:
            hidden = tensor if tensor is not None else (args[0] if args else kwargs["hidden_states"])
            return (hidden,) if chain.gives_tuples else hidden

        return give

    before = {number: vars(chain.blocks[number]).get("forward") for number in given}
    try:
        for number, tensor in given.items():
            chain.blocks[number].forward = forward(tensor)
        yield
    finally:
        for number, own in before.items():
            if own is None:
                vars(chain.blocks[number]).pop("forward", None)
            else:
                chain.blocks[number].forward = own


@torch.no_grad()
def drop_layers(chain: BlockChain, removed: Collection[int]) -> None:
    """Remove layers from the model, number the others anew for its cache, and give it a configuration of its own.

    Raises:
        ValueError: The configuration cannot express it. The model is as it was.
        RuntimeError: The shallower model gives other logits; that is a bug.
    """
    model: Any = chain.model
    _check_expressed(chain, removed)
    with passing(chain, dict.fromkeys(removed)):
        before = chain.logits()
    stay = _staying(chain, removed)
    old, new = model.config, _shallower(model.config, len(chain), stay)
    holder, _, name = chain.path.rpartition(".")
    setattr(model.get_submodule(holder), name, nn.ModuleList(chain.blocks[number] for number in stay))
    for module in model.modules():
        if vars(module).get("config") is old:
            module.config = new
    for place, number in enumerate(stay):
        for module in chain.blocks[number].modules():
            if "layer_idx" in vars(module):
                module.layer_idx = place  # type: ignore[assignment]
    off = float((chain.logits() - before).abs().max() / before.abs().max())
    if not off <= 1e-3:
        raise RuntimeError(f"without its layers {removed} the model's logits differ by {off:.2g} of the largest.")


def _entering(chain: BlockChain, tokens: Tensor, removed: Collection[int]) -> list[Tensor]:
    """What enters each block, without the removed ones."""
    found: list[Tensor] = []

    def note(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found.append(args[0] if args else kwargs["hidden_states"])

    with ExitStack() as stack:
        for block in chain.blocks:
            stack.enter_context(block.register_forward_pre_hook(note, with_kwargs=True))
        stack.enter_context(passing(chain, dict.fromkeys(removed)))
        chain.model(tokens, use_cache=False)
    return found


def _staying(chain: BlockChain, removed: Collection[int]) -> list[int]:
    return [number for number in range(len(chain)) if number not in removed]


def _shallower(config: Any, layers: int, stay: list[int]) -> Any:
    """A configuration with fewer layers; its lists with one entry for each layer follow."""
    new = deepcopy(config)
    text = new.get_text_config()
    for key, value in list(vars(text).items()):
        if "layer" in key and isinstance(value, list | tuple) and len(value) == layers:
            setattr(text, key, [value[number] for number in stay])
    text.num_hidden_layers = len(stay)
    return new


def _check_expressed(chain: BlockChain, removed: Collection[int]) -> None:
    """Check that the configuration builds every layer that stays as it is, at its new place."""
    stay = _staying(chain, removed)
    built = without_weights(type(chain.model), _shallower(chain.model.config, len(chain), stay))
    blocks: Any = [] if built is None else built.get_submodule(chain.path)
    if len(blocks) == len(stay):
        pairs = [(_described(chain.blocks[number]), _described(blocks[place])) for place, number in enumerate(stay)]
        other = next((key for own, new in pairs for key in own if own[key] != new.get(key)), None)
        if other is None:
            return
        why = f"{other} depends on a layer's place"
    else:
        why = "it gives another number of layers"
    raise ValueError(
        f"the configuration of {type(chain.model).__name__} cannot express fewer layers: {why}. Remove units instead "
        "(units=True)."
    )


def _described(block: nn.Module) -> dict[str, Any]:
    """The shapes and plain settings of a block's modules."""
    found: dict[str, Any] = {name: tensor.shape for name, tensor in block.state_dict().items()}
    for path, module in block.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, int | float | str) and not key.startswith("_") and key not in _FREE:
                found[f"{path}.{key}".lstrip(".")] = value
    return found
