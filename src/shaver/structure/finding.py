"""The groups of any model, found by watching where its channels go."""

from collections.abc import Collection, Mapping
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from shaver.batches import Forward, outputs_in
from shaver.measure.evaluating import evaluating
from shaver.measure.example import call
from shaver.naming import check_name
from shaver.structure.arrivals import Arrivals
from shaver.structure.assembling import assemble, distinct
from shaver.structure.coupling import Coupling
from shaver.structure.groups import Group, Groups, Kind
from shaver.structure.heads import packed_heads
from shaver.structure.probing import Probing
from shaver.structure.tracing import trace, traced_groups


def find_groups(
    model: nn.Module,
    example: Any,
    *,
    forward: Forward | None = None,
    residual: bool = False,
    seconds: float = 60.0,
    kinds: Collection[str] | None = None,
    by: Literal["probing", "torch-pruning"] = "probing",
) -> Groups:
    """Which channels, hidden units and attention heads of a model must go together.

    Example:
        >>> groups = find_groups(shaver.zoo.build("lenet"), torch.randn(1, 1, 28, 28))
        >>> {name: group.units for name, group in groups.items()}
        {'conv1': 6, 'conv2': 16, 'conv3': 120, 'fc1': 84}
        >>> groups.left_out
        {'fc2': "it makes the model's output"}

    A group is returned only if nothing but its units arrives where they are read. Layers that make the output are
    never in a group, nor is what the model reads; streams to which several layers add only with ``residual=True``.

    Args:
        model: Left as it was: mode, tensors and random state.
        example: Inputs: a tensor, a tuple of positional or a dict of keyword arguments.
        forward: ``forward(model, batch)`` for a batch of another kind, or outputs that are not a tensor.
        residual: Also the channels of residual streams, where they can be removed exactly. They cannot where a
            LayerNorm takes its mean over them.
        seconds: A ``TimeoutError`` says where the search stopped after so long.
        kinds: Only these of ``"channels"``, ``"hidden"``, ``"heads"`` and ``"residual"``.
        by: ``"probing"`` spoils the outputs of each layer and watches where they arrive, which holds for any code.
            ``"torch-pruning"`` asks that package's dependency graph and keeps what the probes confirm: convolutional
            networks, and linear layers that are not attention.

    Returns:
        The groups in the order in which the model calls its layers, and ``left_out``: layers that are in none, and
        why.

    Raises:
        ValueError: There are no groups, or ``kinds`` names something else.
        RuntimeError: The example does not run through the model.
        TimeoutError: After ``seconds``.
    """
    wanted = {check_name("kind of group", kind, get_args(Kind)) for kind in kinds} if kinds is not None else None
    check_name("way to find groups", by, ("probing", "torch-pruning"))
    run = forward or _forward
    with evaluating(model):
        batch = _short(model, run, example)
        traced = trace(model, lambda given: run(model, given), batch, seconds) if by == "torch-pruning" else None
        with Probing(model, lambda given: run(model, given), batch, seconds) as probing:
            arrivals = Arrivals(probing)
            if traced is not None:
                found, left_out = traced_groups(arrivals, traced, residual)
            else:
                coupling = Coupling(arrivals, residual)
                found, left_out = assemble(coupling), coupling.left_out
            silent = arrivals.silent([group for _, group in found], _moved(batch))
    for (_, group), fine in zip(found, silent, strict=True):
        if not fine:
            left_out[group.name] = "something else arrives where its units are read"
    places = {layer.name: place for place, layer in enumerate(probing.order)}
    placed = [pair for pair, fine in zip(found, silent, strict=True) if fine]
    placed += [(places[name], group) for name, group in packed_heads(model).items() if name in places]
    groups = [group for _, group in distinct(sorted(placed, key=lambda pair: pair[0]))]
    kept = {group.name: group for group in groups if wanted is None or group.kind in wanted}
    if not kept:
        raise ValueError(_nothing(model, left_out, wanted, groups))
    return Groups(kept, left_out=left_out)


def _forward(model: nn.Module, batch: Any) -> Tensor:
    return outputs_in(call(model, batch))


def _short(model: nn.Module, run: Forward, example: Any) -> Any:
    """Two samples of the example, or all of it where the model does not take two.

    Raises:
        RuntimeError: The model does not take the example either.
    """
    batch = dict(example) if isinstance(example, Mapping) else example
    lengths = {len(value) for value in tree_leaves(batch) if isinstance(value, Tensor) and value.ndim}
    if len(lengths) == 1 and lengths.pop() > 2:
        shorter = tree_map(lambda value: value[:2] if isinstance(value, Tensor) and value.ndim else value, batch)
        try:
            run(model, shorter)
        except Exception:  # Whatever the user's model raises: the example as it is decides.
            pass
        else:
            return shorter
    try:
        run(model, batch)
    except Exception as error:
        raise RuntimeError(
            f"the example does not run through {type(model).__name__}: {error} An example is a tensor, a tuple "
            "of positional or a dict of keyword arguments; forward=lambda model, batch: … covers others."
        ) from error
    return batch


def _moved(batch: Any) -> Any:
    """The batch with other numbers in it; masks, which are no data, stay."""

    def one(value: Any) -> Any:
        if not isinstance(value, Tensor) or not value.is_floating_point():
            return value
        return value + torch.linspace(1, 2, value.numel(), device=value.device).reshape(value.shape).to(value.dtype)

    if isinstance(batch, Mapping):
        return {key: value if "mask" in str(key) else tree_map(one, value) for key, value in batch.items()}
    return tree_map(one, batch)


def _nothing(model: nn.Module, left_out: Mapping[str, str], wanted: set[str] | None, found: list[Group]) -> str:
    kind = type(model).__name__
    if found:
        others = ", ".join(sorted({group.kind for group in found}))
        return f"{kind} has no groups of kinds={sorted(wanted or ())!r}; it has groups of {others}."
    if not left_out:
        return f"{kind} calls no layer whose channels could be removed (linear layers, convolutions, attention)."
    reasons = "; ".join(f"{name}: {reason}" for name, reason in left_out.items())
    return f"{kind} has no units that could be removed. {reasons}."
