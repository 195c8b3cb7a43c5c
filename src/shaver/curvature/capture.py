"""Watching a model at work: what went into each module, and where its output sits in the autograd graph."""

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from torch.utils.hooks import RemovableHandle

from shaver.batches import Forward, batch_size_of, forward_of


@dataclass
class Call:
    """One call of one module.

    Attributes:
        name: The module's name in the model.
        module: The module.
        inputs: Its first tensor argument, detached.
        edge: Where its output's gradient arrives, in whatever shape. An edge, not the tensor: an in-place activation
            that overwrites the output afterwards does not move it.
        shape: The output's.
        parameter: For a raw parameter that was given a copy a sample: its own name in the module; the edge is the
            copies' then.
    """

    name: str
    module: nn.Module
    inputs: Tensor
    edge: GradientEdge
    shape: torch.Size
    parameter: str | None = None


@dataclass(frozen=True)
class Copies:
    """A raw parameter of a module that can be given one copy a sample, because it is used by broadcasting.

    Attributes:
        name: The module's name in the model.
        module: The module.
        own: The parameter's name in it.
        ones: Dimensions of size one between the samples and the parameter's own; −1 where its first dimension is
            already one for the samples, as in a class token ``(1, 1, D)``.
    """

    name: str
    module: nn.Module
    own: str
    ones: int

    def expand(self, parameter: Tensor, count: int) -> Tensor:
        """A view with one copy a sample; the gradient that reaches it is the per-sample gradient."""
        if self.ones < 0:
            return parameter.expand(count, *parameter.shape[1:])
        return parameter.reshape(1, *(1,) * self.ones, *parameter.shape).expand(
            count, *(1,) * self.ones, *parameter.shape
        )


@dataclass(frozen=True)
class Spread:
    """A module whose input has no samples, such as position embeddings: all samples share what it returns.

    Its output is handed on with one copy a sample, a view, so that the gradient that reaches it is each sample's own.

    Attributes:
        ndim: Dimensions of the input that are shared by all samples. An input with others is left alone.
        ones: 0 where the input's first dimension is a one that stands for the samples, 1 where there is none.
    """

    ndim: int
    ones: int

    def fits(self, inputs: Tensor) -> bool:
        """Whether this call is one without samples."""
        return inputs.ndim == self.ndim and (self.ones == 1 or inputs.shape[0] == 1)

    def expand(self, values: Tensor, count: int) -> Tensor:
        """A view with one copy a sample in front."""
        return values.expand(count, *values.shape[1 - self.ones :])


@contextmanager
def recording(
    modules: Mapping[str, nn.Module],
    copies: Sequence[Copies],
    count: int,
    linears: Mapping[str, Tensor] | None = None,
    spread: Mapping[str, Spread] | None = None,
) -> Iterator[list[Call]]:
    """Record the calls of ``modules`` made inside the block, in order. The hooks are gone afterwards.

    Args:
        modules: Name → module.
        copies: Raw parameters to give one copy a sample.
        count: The number of samples.
        linears: Weights whose use in ``F.linear`` outside a layer of their own is recorded too.
        spread: Name → how, for those of ``modules`` whose input has no samples.
    """
    calls: list[Call] = []

    def keep(call: Call, made_by: Node) -> None:
        append(calls, call, made_by)

    handles = watch(modules, copies, keep, lambda: count, spread or {})
    try:
        with functional_linears(linears or {}, keep):
            yield calls
    finally:
        for handle in handles:
            handle.remove()


#: ``keep(call, node)``: what is to be done with a call whose output that node made.
Keep = Callable[[Call, Node], None]


def append(calls: list[Call], call: Call, made_by: Node) -> None:
    """Add a call; the ``F.linear`` that a recorded layer has just made itself is the layer's own record's."""
    if calls and is_functional(calls[-1]) and not is_functional(call) and calls[-1].edge.node is made_by:
        calls.pop()
    calls.append(call)


#: What the name of a recorded call of ``F.linear`` begins with; the weight's name follows.
FUNCTIONAL = "F.linear:"


def is_functional(call: Call) -> bool:
    """Whether a call is one of ``F.linear`` by itself."""
    return call.name.startswith(FUNCTIONAL)


@dataclass
class LinearCall:
    """Stands for the layer in a call of ``F.linear`` with a weight that has none, such as packed attention's."""

    weight: Tensor
    bias: Tensor | None


@contextmanager
def functional_linears(weights: Mapping[str, Tensor], keep: Keep) -> Iterator[None]:
    """Hand every ``F.linear(x, w, b)`` with one of ``weights`` as w to ``keep``.

    ``torch.nn.functional.linear`` is replaced inside the block; ``MultiheadAttention`` finds it by that name.
    """
    if not weights:
        yield
        return
    names = {id(w): name for name, w in weights.items()}
    plain = F.linear

    def linear(inputs: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        output = plain(inputs, weight, bias)
        name = names.get(id(weight))
        if name is not None and output.requires_grad:
            stand_in: Any = LinearCall(weight, bias)
            edge = _edge(output)
            keep(Call(FUNCTIONAL + name, stand_in, inputs.detach(), edge, output.shape), edge.node)
        return output

    F.linear = linear  # type: ignore[assignment]
    try:
        yield
    finally:
        F.linear = plain


def watch(
    modules: Mapping[str, nn.Module],
    copies: Sequence[Copies],
    keep: Keep,
    count: Callable[[], int],
    spread: Mapping[str, Spread],
) -> list[RemovableHandle]:
    """Register the hooks behind :func:`recording`; ``count`` is asked at every call, and 0 turns them off.

    Args:
        modules: Name → module.
        copies: Raw parameters to give one copy a sample.
        keep: What to do with a call.
        count: The number of samples.
        spread: Name → how, for those of ``modules`` whose input has no samples.
    """
    handles = []
    for name, module in modules.items():
        if name in spread:
            hook: Callable[..., Tensor | None] = spreader(name, spread[name], keep, count)
        else:
            hook = recorder(name, keep, count)
        handles.append(module.register_forward_hook(hook, with_kwargs=True))
    for raw in copies:
        handles.append(raw.module.register_forward_pre_hook(copier(raw, keep, count)))
        handles.append(raw.module.register_forward_hook(_restorer(raw), always_call=True))
    return handles


def copier(raw: Copies, keep: Keep, count: Callable[[], int]) -> Callable[..., None]:
    """A forward pre-hook that puts one copy a sample in the parameter's place until the forward hook takes it away."""

    def before(module: nn.Module, args: object) -> None:
        parameter, samples = module._parameters[raw.own], count()
        if samples and parameter is not None and parameter.requires_grad and torch.is_grad_enabled():
            expanded = raw.expand(parameter, samples)
            module.__dict__[raw.own] = expanded  # found before the parameter, which stays registered
            edge = get_gradient_edge(expanded)
            keep(Call(raw.name, module, parameter.detach(), edge, expanded.shape, raw.own), edge.node)

    return before


def _restorer(raw: Copies) -> Callable[..., None]:
    def after(module: nn.Module, args: object, output: object) -> None:
        module.__dict__.pop(raw.own, None)

    return after


def recorder(name: str, keep: Keep, count: Callable[[], int]) -> Callable[..., None]:
    """A forward hook that hands every call with a gradient to ``keep``."""

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs = _first_tensor(args, kwargs)
        if isinstance(output, Tensor) and output.requires_grad and inputs is not None:
            edge = _edge(output)
            keep(Call(name, module, inputs.detach(), edge, output.shape), edge.node)

    recorded: Callable[..., None] = record
    if "torch._dynamo" in sys.modules:  # a compiler would trace it, with tensors that have no graph
        recorded = torch.compiler.disable(record)  # type: ignore[no-untyped-call]

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if count():
            recorded(module, args, kwargs, output)

    return hook


def spreader(name: str, how: Spread, keep: Keep, count: Callable[[], int]) -> Callable[..., Tensor | None]:
    """The same for a module whose input has no samples: input and output are given one copy a sample."""
    record = recorder(name, keep, count)

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Tensor | None:
        inputs, samples = _first_tensor(args, kwargs), count()
        if not samples or inputs is None or not isinstance(output, Tensor) or not how.fits(inputs):
            record(module, args, kwargs, output)
            return None
        spread = how.expand(output, samples)
        record(module, (how.expand(inputs, samples),), {}, spread)
        return spread

    return hook


def _edge(output: Tensor) -> GradientEdge:
    """Where the output's gradient arrives: before the reshape that a linear layer may end with.

    An activation that works in place on a view would take the view's node out of the graph.
    """
    base = output._base
    if base is None or base.grad_fn is None or base.numel() != output.numel():
        return get_gradient_edge(output)
    return get_gradient_edge(base if base.is_contiguous() and output.is_contiguous() else output)


def _first_tensor(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor | None:
    return next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Evaluation mode with gradients on; every submodule's mode and the random state are put back afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    devices = list({p.device for p in model.parameters() if p.device.type == "cuda"})
    try:
        with torch.inference_mode(False), torch.enable_grad(), torch.random.fork_rng(devices):
            model.eval()
            yield
    finally:
        for module, mode in modes:
            module.training = mode


class Functional:
    """The model as a function of some of its parameters and a batch, through the user's ``forward``."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        self.model = model
        self.run = forward or forward_of

    def __call__(self, batch: Any) -> Tensor:
        """The outputs for a batch."""
        return self.run(self.model, batch)

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


def take(batch: Any, index: slice | Tensor) -> Any:
    """Some samples of a batch: every tensor with the batch's length is indexed, everything else stays."""
    size = batch_size_of(batch)
    return tree_map(lambda v: v[index] if isinstance(v, Tensor) and v.ndim and len(v) == size else v, batch)


def split_samples(batch: Any) -> tuple[list[Tensor], Callable[[list[Tensor]], Any]]:
    """The tensors of a batch that have a row a sample, and a function that rebuilds a batch from such tensors."""
    size = batch_size_of(batch)
    leaves, spec = tree_flatten(batch)
    places = [i for i, v in enumerate(leaves) if isinstance(v, Tensor) and v.ndim and len(v) == size]

    def rebuild(rows: list[Tensor]) -> Any:
        values = list(leaves)
        for place, value in zip(places, rows, strict=True):
            values[place] = value
        return tree_unflatten(values, spec)

    return [leaves[i] for i in places], rebuild
