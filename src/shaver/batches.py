"""Batches: a tuple ``(inputs, targets)``, a dict with ``labels``, or any layout with the user's own functions."""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils._pytree import tree_leaves

#: The key of a dict batch that holds the targets.
LABELS = "labels"
#: The label that is ignored, as in ``F.cross_entropy``.
IGNORED = -100

#: How torch complains about shapes and types of inputs.
_SHAPES = re.compile(
    "shapes? cannot be multiplied|[Ee]xpected .*(channels|shape|size|dtype|[Ii]nput)|must have the same dtype"
)

#: ``forward(model, batch)``: the outputs (logits, means) of the network for one batch.
Forward = Callable[[nn.Module, Any], Tensor]
#: ``targets(batch)``: the targets that the outputs are compared with.
Targets = Callable[[Any], Tensor]


def check_network(model: object, what: str) -> nn.Module:
    """Refuse anything but a network of dense real parameters that have values.

    Raises:
        TypeError: It is not a module, or some of its parameters are complex or sparse.
        ValueError: It has no parameters, or some of its tensors are lazy or on the meta device.
    """
    network = check_values(model, what)
    parameters = dict(network.named_parameters())
    if not parameters:
        raise ValueError(f"{type(network).__name__} has no trainable parameters: there is nothing for {what} to do.")
    for name, parameter in parameters.items():
        if parameter.is_complex() or parameter.layout != torch.strided:
            raise TypeError(
                f"parameter {name!r} is {parameter.dtype}, {parameter.layout}; {what} needs dense real parameters."
            )
    return network


def check_values(model: object, what: str) -> nn.Module:
    """Refuse anything but a network whose parameters and buffers have values.

    Raises:
        TypeError: It is not a module.
        ValueError: A tensor is lazy or on the meta device.
    """
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}; create an instance first" if isinstance(model, type) else repr(model)
        raise TypeError(f"{what} takes a network, a torch.nn.Module, not {kind}.")
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        if is_lazy(tensor):
            raise ValueError(f"{name!r} is lazy and has no shape yet: call the network once on an input before {what}.")
        if tensor.is_meta:
            raise ValueError(f"{name!r} is on the meta device and has no values; load the weights first.")
    return model


def check_batches(batches: object, what: str) -> Any:
    """Refuse what cannot be iterated over, such as a number."""
    if not hasattr(batches, "__iter__"):
        raise TypeError(f"{what} takes batches, such as a DataLoader or a list of (inputs, targets), not {batches!r}.")
    return batches


def forward_of(model: nn.Module, batch: Any) -> Tensor:
    """The network's outputs for one batch.

    A tuple or list ``(x, y)`` calls ``model(x)``, and ``(x1, x2, y)`` calls ``model(x1, x2)``. A dict passes every
    entry except ``labels`` as a keyword argument. Outputs with ``.logits`` (or a ``"logits"`` entry) are unwrapped.

    Raises:
        TypeError: The batch has another layout, or the outputs are not a tensor.
    """
    _check_tensors(batch)
    named = {key: value for key, value in batch.items() if key != LABELS} if isinstance(batch, Mapping) else None
    inputs = _pair(batch)[:-1] if named is None else list(named.values())
    with naming_inputs(model, inputs):
        outputs = model(*inputs) if named is None else _call(model, named)
    return outputs_in(outputs)


def tensors_in(tree: object) -> list[Tensor]:
    """The tensors of a nested structure, in order."""
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


@contextmanager
def naming_inputs(model: nn.Module, inputs: Sequence[Any]) -> Iterator[None]:
    """Add the network and the input shapes to torch's error (as a ``ValueError``), which often names only a product."""
    try:
        yield
    except RuntimeError as error:
        if not _SHAPES.search(str(error)):
            raise
        given = ", ".join(f"{tuple(x.shape)} {x.dtype}" for x in inputs if isinstance(x, Tensor))
        raise ValueError(f"{type(model).__name__} cannot take inputs of shape {given}: {error}.") from error


def outputs_in(result: Any) -> Tensor:
    """The outputs in a model's return value: the tensor itself, or its ``.logits`` (or ``"logits"`` entry).

    Raises:
        TypeError: The return value has no such tensor.
    """
    if isinstance(result, Mapping) and "logits" in result:
        result = result["logits"]
    result = getattr(result, "logits", result)
    if not isinstance(result, Tensor):
        raise TypeError(
            f"the model returned a {type(result).__name__}, not a tensor or something with .logits; "
            "pass forward=lambda model, batch: … that returns the outputs (to SpaM: outputs=lambda result: …)."
        )
    return result


def targets_of(batch: Any) -> Tensor:
    """The targets of one batch: the last entry of a tuple, or the ``labels`` of a dict.

    Raises:
        TypeError: The batch has another layout, or the targets are not a tensor.
        KeyError: The dict has no ``labels``.
    """
    if isinstance(batch, Mapping):
        if LABELS not in batch:
            raise KeyError(
                f"a dict batch needs the key {LABELS!r}; this one has {', '.join(map(repr, batch))}. "
                "Pass targets=lambda batch: … for another layout."
            )
        targets = batch[LABELS]
    else:
        targets = _pair(batch)[-1]
    if not isinstance(targets, Tensor):
        raise TypeError(
            f"the batch's targets are a {type(targets).__name__}, not a tensor; pass targets=lambda batch: …"
        )
    return targets


def next_tokens(batch: Any) -> Tensor:
    """The targets of a causal language model's batch: at each position the label of the next token.

    Such models take unshifted ``labels`` and shift them in their own loss, so comparing their logits with targets needs
    the same shift. The last position has no next token and is ignored.

    Example:
        >>> next_tokens({"input_ids": torch.tensor([[5, 6, 7]]), "labels": torch.tensor([[5, 6, 7]])})
        tensor([[   6,    7, -100]])
    """
    return F.pad(targets_of(batch)[:, 1:], (0, 1), value=IGNORED)


def batch_size_of(batch: Any) -> int:
    """The number of samples in one batch: the length of the first tensor found in it.

    Raises:
        TypeError: The batch holds no tensor with a batch dimension.
    """
    for value in tree_leaves(batch):
        if isinstance(value, Tensor) and value.ndim:
            return len(value)
    _check_tensors(batch)
    raise TypeError(f"cannot tell the size of a batch of type {type(batch).__name__}: it holds no tensor.")


def _check_tensors(batch: Any) -> None:
    """Numpy arrays reach a network as they are, and torch's own message does not name them."""
    for value in tree_leaves(batch):
        if type(value).__module__ == "numpy" and hasattr(value, "shape"):
            raise TypeError(f"the batch holds a numpy array of shape {value.shape}; use torch.as_tensor(array).")


def _call(model: nn.Module, arguments: Mapping[str, Any]) -> Any:
    try:
        return model(**arguments)
    except TypeError as error:
        if "unexpected keyword argument" not in str(error):
            raise
        raise TypeError(
            f"{error}. Every entry of a dict batch except {LABELS!r} is passed to the model as a keyword argument, "
            f"here {', '.join(map(repr, arguments))}; pass forward=lambda model, batch: … and "
            "targets=lambda batch: … for another layout."
        ) from error


def _pair(batch: Any) -> Sequence[Any]:
    if isinstance(batch, tuple | list) and len(batch) >= 2:
        return batch
    given = f"a {type(batch).__name__}" + (f" of length {len(batch)}" if isinstance(batch, tuple | list) else "")
    raise TypeError(
        f"a batch is a tuple (inputs, targets) or a dict with {LABELS!r}, not {given}; "
        "pass forward=lambda model, batch: … and targets=lambda batch: … for another layout."
    )
