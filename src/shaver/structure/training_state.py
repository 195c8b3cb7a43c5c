"""The state of optimizers, SpaM and held masks, sliced with the network so that training can go on."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from shaver.pruning.masks import Hold, Masks
from shaver.selection import Dims, take
from shaver.structure.record import RemovalRecord, weight_beside

if TYPE_CHECKING:
    from shaver.spam import SpaM


@contextmanager
def sliced_training_state(
    model: nn.Module,
    record: RemovalRecord,
    optimizers: Sequence[Optimizer],
    spam: "SpaM | None",
    hold: Hold | None,
) -> Iterator[None]:
    """Check and slice everything that keeps values per weight; after the block, which slices the network, put it in.

    Raises:
        ValueError: A state belongs to another network or cannot be sliced; nothing is changed.
    """
    parameters = dict(model.named_parameters(remove_duplicate=False))
    dims: dict[Tensor, Dims] = {parameters[name]: kept for name, kept in record.kept.items() if name in parameters}
    weights = {bias: parameters[weight_beside(bias)] for bias in record.biases}
    own = {id(parameter) for parameter in parameters.values()}
    states = [pair for optimizer in optimizers for pair in _sliced(optimizer, own, dims)]
    if spam is not None and getattr(spam, "model", None) is not model:
        raise ValueError("spam belongs to another network, not to the one being made smaller.")
    if hold is not None and hold._model is not model:
        raise ValueError("the masks are held on another network, not on the one being made smaller.")
    held = {} if hold is None else hold.masks
    masks = Masks({name: take(mask, record.kept.get(name)) for name, mask in held.items()})
    yield
    for state, sliced in states:
        state.update(sliced)
    for bias, weight in weights.items():  # an added bias is trained with the weight of its layer
        for group in (group for optimizer in optimizers for group in optimizer.param_groups):
            if any(p is weight for p in group["params"]):
                group["params"].append(model.get_parameter(bias))
    if spam is not None:
        spam.select(record.kept)
    if hold is not None:
        hold.update(masks)


def _sliced(
    optimizer: Optimizer, own: set[int], dims: Mapping[Tensor, Dims]
) -> list[tuple[dict[str, Any], dict[str, Tensor]]]:
    """For each parameter that loses something, its state and the entries that change, sliced."""
    kind = type(optimizer).__name__
    if isinstance(optimizer, LBFGS):
        raise ValueError(f"{kind} keeps a history of whole steps, which cannot be sliced; build a new one afterwards.")
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if held and not any(id(p) in own for p in held):
        raise ValueError(f"the {kind} optimizer trains another network, not the one being made smaller.")
    states = []
    for parameter, kept in dims.items():
        state = optimizer.state.get(parameter, {})
        where = {key: _slices(value, parameter.shape, kept) for key, value in state.items()}
        for key, slices in where.items():
            if slices is None:
                raise ValueError(
                    f"{kind} keeps {key!r} of shape {tuple(state[key].shape)} for a parameter of shape "
                    f"{tuple(parameter.shape)}; only state shaped like its parameter can be sliced."
                )
        states.append((state, {key: take(state[key], slices) for key, slices in where.items() if slices}))
    return states


def _slices(value: object, shape: torch.Size, dims: Dims) -> dict[int, Tensor] | None:
    """How a state is sliced: like its parameter, except along dimensions that it sums up; None if it cannot be."""
    if not isinstance(value, Tensor) or value.numel() <= 1:
        return {}
    if value.ndim != len(shape) or any(n not in (1, full) for n, full in zip(value.shape, shape, strict=True)):
        return None
    return {dim: positions for dim, positions in dims.items() if value.shape[dim] == shape[dim]}
