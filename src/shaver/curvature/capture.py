"""Recording a forward pass: each layer's inputs, and the position of its output in the autograd graph.

Hooks are installed when a recorded pass begins and removed when it ends; nothing stays on the model.
"""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shaver.batches import Forward, batch_size_of, check_values, forward_of

#: Prefix of the name of a recorded call of ``F.linear``; the weight's name follows.
FUNCTIONAL = "F.linear:"


@dataclass
class Call:
    """One call of one layer."""

    name: str  # the module's name in the model, or FUNCTIONAL and the weight's name
    module: Any  # the module, or a LinearCall
    inputs: Tensor  # its first tensor argument, detached
    # Where the gradient of its output arrives, in any shape. It is an edge and not the tensor, because an in-place
    # activation that overwrites the output does not change the edge.
    edge: GradientEdge
    shape: torch.Size  # the output's shape
    # For a raw parameter with one copy per sample: its own name in the module. The edge is that of the copies.
    parameter: str | None = None

    @property
    def is_functional(self) -> bool:
        """Whether this is a call of ``F.linear`` outside a layer."""
        return self.name.startswith(FUNCTIONAL)


@dataclass
class LinearCall:
    """Stands in for the layer of a call of ``F.linear`` whose weight has no layer, as in packed attention."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True)
class Copies:
    """A raw parameter of a module that can have one copy per sample, because it is broadcast over the samples."""

    name: str  # the module's name in the model
    module: nn.Module
    own: str  # the parameter's name in it
    ones: int  # see per_sample; −1 for a class token (1, 1, D)


@dataclass(frozen=True)
class SharedInput:
    """A module whose input has no samples, such as position embeddings: all samples share its output.

    The output is expanded to a view with one copy per sample, so that each copy receives its sample's gradient.
    """

    ndim: int  # Number of dimensions of the shared input. Calls with another input are recorded normally.
    ones: int  # −1 if the input's first dimension, of size one, stands for the samples; 0 if there is no such dimension

    def fits(self, inputs: Tensor) -> bool:
        """Whether the input of this call has no samples."""
        return inputs.ndim == self.ndim and (self.ones == 0 or inputs.shape[0] == 1)


def per_sample(values: Tensor, count: int, ones: int) -> Tensor:
    """A view with one copy per sample; the gradient that reaches a copy is the gradient of its sample.

    ``ones`` dimensions of size one are between the samples and the values' own dimensions; −1 if the first of these
    already stands for the samples.
    """
    if ones < 0:
        return values.expand(count, *values.shape[1:])
    shape = (*(1,) * ones, *values.shape)
    return values.reshape(1, *shape).expand(count, *shape)


@dataclass
class Recording:
    """What to record of a forward pass."""

    modules: Mapping[str, nn.Module] = field(default_factory=dict)  # layers, by their name in the model
    # weights whose use in F.linear outside a layer is recorded, by parameter name
    linears: Mapping[str, Tensor] = field(default_factory=dict)
    copies: Sequence[Copies] = ()  # raw parameters that get one copy per sample
    # how the modules whose input has no samples get one copy per sample
    spread: Mapping[str, SharedInput] = field(default_factory=dict)

    @contextmanager
    def of(self, count: int, running: nn.Module | None = None) -> Iterator[list[Call]]:
        """Record the calls made inside the block, in order, for a batch of ``count`` samples.

        The forward pass of the module ``running`` has already begun: pre-hooks on it would be too late.
        """
        calls: list[Call] = []
        with ExitStack() as stack:
            for name, module in self.modules.items():
                hook = partial(_record, calls, name, self.spread.get(name), count)
                stack.callback(module.register_forward_hook(hook, with_kwargs=True).remove)
            for raw in self.copies:
                place = partial(_place, calls, raw, count)
                stack.callback(raw.module.__dict__.pop, raw.own, None)
                if raw.module is running:
                    place(running, ())
                else:
                    stack.callback(raw.module.register_forward_pre_hook(place).remove)
                    remove = raw.module.register_forward_hook(partial(_unplace, raw), always_call=True).remove
                    stack.callback(remove)
            if self.linears:
                stack.enter_context(_functional_linears(calls, self.linears))
            yield calls


def _record(
    calls: list[Call],
    name: str,
    spread: SharedInput | None,
    count: int,
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    output: Any,
) -> Tensor | None:
    """A forward hook that keeps a layer's call if it has a gradient."""
    inputs = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
    if not isinstance(output, Tensor) or not output.requires_grad or inputs is None:
        return None
    is_spread = spread is not None and spread.fits(inputs)
    if spread is not None and is_spread:
        inputs, output = per_sample(inputs, count, spread.ones), per_sample(output, count, spread.ones)
    edge = _edge(output)
    if calls and calls[-1].is_functional and calls[-1].edge.node is edge.node:
        calls.pop()  # the F.linear that this layer has just called itself
    calls.append(Call(name, module, inputs.detach(), edge, output.shape))
    return output if is_spread else None


def _place(calls: list[Call], raw: Copies, count: int, module: nn.Module, args: object) -> None:
    """A forward pre-hook that replaces a raw parameter by one copy per sample until the forward pass ends."""
    parameter = module._parameters[raw.own]
    if parameter is not None and parameter.requires_grad and torch.is_grad_enabled():
        expanded = per_sample(parameter, count, raw.ones)
        module.__dict__[raw.own] = expanded  # found before the parameter, which stays registered
        calls.append(Call(raw.name, module, parameter.detach(), get_gradient_edge(expanded), expanded.shape, raw.own))


def _unplace(raw: Copies, module: nn.Module, args: object, output: object) -> None:
    module.__dict__.pop(raw.own, None)


@contextmanager
def _functional_linears(calls: list[Call], weights: Mapping[str, Tensor]) -> Iterator[None]:
    """Record every ``F.linear(x, w, b)`` with one of ``weights`` as w.

    ``torch.nn.functional.linear`` is replaced inside the block, because ``MultiheadAttention`` finds it by that name. A
    ``TorchFunctionMode`` would not see it: inside ``F.multi_head_attention_forward`` the mode is switched off, and
    switched on again it would call that function endlessly. It would also slow down every operation of the pass.
    """
    names = {id(w): name for name, w in weights.items()}
    plain = F.linear

    def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = plain(inputs, weight, bias)
        name = names.get(id(weight))
        if name is not None and output.requires_grad:
            layer = LinearCall(weight, bias)
            calls.append(Call(FUNCTIONAL + name, layer, inputs.detach(), _edge(output), output.shape))
        return output

    F.linear = linear  # type: ignore[assignment]
    try:
        yield
    finally:
        F.linear = plain


def _edge(output: Tensor) -> GradientEdge:
    """Where the output's gradient arrives, before the reshape at the end of some linear layers.

    An in-place activation on a view would remove the view's node from the graph.
    """
    base = output._base
    if base is None or base.grad_fn is None or base.numel() != output.numel():
        return get_gradient_edge(output)
    return get_gradient_edge(base if base.is_contiguous() and output.is_contiguous() else output)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with gradients on; every submodule's mode and the random state are restored afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    devices = list({p.device for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices):
            model.eval()
            yield
    finally:
        for module, mode in modes:
            module.training = mode


@contextmanager
def uncompiled() -> Iterator[None]:
    """Run networks uncompiled: a compiled network may skip hooks and refuses a second backward pass."""
    if "torch._dynamo" not in sys.modules:
        yield
        return
    with torch.compiler.set_stance("force_eager"):
        yield


class Functional:
    """The model as a function of some of its parameters and a batch, through the user's ``forward``."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        self.model = model
        self.run = forward or forward_of
        self.copies_inputs = False  # whether the model runs on copies of the batch, because it changes it in place

    def __call__(self, batch: Any) -> Tensor:
        """The outputs for a batch."""
        return self.run(self.model, copied(batch) if self.copies_inputs else batch)

    def at(self, weights: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The outputs with ``weights`` in place of the model's own parameters of those names."""
        with self.placed(weights):
            return self(batch)

    @contextmanager
    def placed(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """``weights`` in place of the model's own parameters of those names, inside the block.

        Tied parameters stay tied. ``torch.func.functional_call`` is not used: it does not restore a module that is
        registered under two names (torch 2.13).
        """
        new = {id(p): weights[name] for name, p in self.model.named_parameters() if name in weights}
        places = [
            (module._parameters, own, p)
            for module in self.model.modules()
            for own, p in module._parameters.items()
            if id(p) in new
        ]
        try:
            for parameters, own, p in places:
                parameters[own] = new[id(p)]  # type: ignore[assignment]
            yield
        finally:
            for parameters, own, p in places:
                parameters[own] = p


@dataclass(frozen=True)
class Samples:
    """Which entries of a batch have one row per sample: those of the batch's length, except ``shared`` ones."""

    # positions of entries that all samples share although they have the batch's length, such as a T × T mask in a
    # batch of T samples
    shared: frozenset[int] = frozenset()

    def take(self, batch: Any, index: slice | Tensor) -> Any:
        """Some samples of a batch."""
        rows, rebuild = self.split(batch)
        return rebuild([row[index] for row in rows])

    def split(self, batch: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
        """The tensors that have one row per sample, and a function that rebuilds a batch from such tensors."""
        size = batch_size_of(batch)
        leaves, spec = tree_flatten(batch)
        places = [i for i, v in enumerate(leaves) if _has_rows(v, size) and i not in self.shared]

        def rebuild(rows: list[Tensor]) -> Any:
            values = list(leaves)
            for place, value in zip(places, rows, strict=True):
                values[place] = value
            return tree_unflatten(values, spec)

        return [leaves[i] for i in places], rebuild

    @staticmethod
    def uncertain(batch: Any) -> list[int]:
        """Positions of the entries that have the batch's length, except the first, which defines it."""
        size = batch_size_of(batch)
        return [i for i, v in enumerate(tree_flatten(batch)[0]) if _has_rows(v, size)][1:]


def _has_rows(value: object, size: int) -> bool:
    return isinstance(value, Tensor) and value.ndim > 0 and len(value) == size


def take(batch: Any, index: slice | Tensor) -> Any:
    """Some samples of a batch: every tensor of the batch's length is indexed; everything else is kept."""
    return Samples().take(batch, index)


def copied(batch: Any) -> Any:
    """The batch with copies of its tensors, for a network that may change its input in place."""
    return tree_map(lambda v: v.detach().clone() if isinstance(v, Tensor) else v, batch)


def trainable_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The parameters that have a curvature, by name."""
    check_values(model, "measuring the curvature")
    found = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not found:
        raise ValueError("the model has no trainable parameter; set requires_grad=True on those to be trained.")
    for name, p in found.items():
        if not p.is_floating_point() or p.layout != torch.strided:
            raise ValueError(
                f"{name!r} is a {p.dtype} tensor with layout {p.layout}; curvature needs dense real numbers. Use "
                "requires_grad_(False) for it, or a dense float parameter."
            )
    return found
