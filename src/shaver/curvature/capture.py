"""Watching a model at work: what went into each module, and where its output sits in the autograd graph."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from shaver.batches import Forward, batch_size_of, forward_of


@dataclass
class Call:
    """One call of one module.

    Attributes:
        name: The module's name in the model.
        module: The module.
        inputs: Its first tensor argument, detached.
        edge: Where its output's gradient arrives. An edge, not the tensor: an in-place activation that
            overwrites the output afterwards does not move it.
        numel: How many numbers the output has.
    """

    name: str
    module: nn.Module
    inputs: Tensor
    edge: GradientEdge
    numel: int


@contextmanager
def recording(modules: Mapping[str, nn.Module]) -> Iterator[list[Call]]:
    """Record the calls of ``modules`` made inside the block, in order. The hooks are gone afterwards."""
    calls: list[Call] = []
    handles = [
        module.register_forward_hook(recorder(name, calls.append), with_kwargs=True) for name, module in modules.items()
    ]
    try:
        yield calls
    finally:
        for handle in handles:
            handle.remove()


def recorder(name: str, keep: Callable[[Call], None]) -> Callable[..., None]:
    """A forward hook that hands every call with a gradient to ``keep``."""

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        inputs = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        if isinstance(output, Tensor) and output.requires_grad and inputs is not None:
            keep(Call(name, module, inputs.detach(), get_gradient_edge(output), output.numel()))

    return hook


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


class Functional(nn.Module):
    """The model as a function of some of its parameters and a batch, through the user's ``forward``."""

    def __init__(self, model: nn.Module, forward: Forward | None) -> None:
        super().__init__()
        self.model = model
        self.run = forward or forward_of

    def forward(self, batch: Any) -> Tensor:
        """The outputs for a batch."""
        return self.run(self.model, batch)

    def at(self, parameters: Mapping[str, Tensor], batch: Any) -> Tensor:
        """The outputs with ``parameters`` in place of the model's own of those names; tied ones stay tied."""
        renamed = {f"model.{name}": value for name, value in parameters.items()}
        return torch.func.functional_call(self, renamed, (batch,))  # type: ignore[no-any-return]


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
