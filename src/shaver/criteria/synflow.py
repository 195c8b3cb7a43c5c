"""SynFlow: |θ · ∂R/∂θ| with R = 1ᵀ ∏|W| 1, the flow through the network; no data (Tanaka et al., 2020)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from shaver.batches import Forward
from shaver.criteria.order import lowest
from shaver.criteria.registry import Given, criterion

_ACTIVATIONS = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.PReLU, nn.RReLU, nn.ELU, nn.SELU, nn.CELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Sigmoid, nn.LogSigmoid, nn.Tanh, nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardswish, nn.Hardsigmoid),
    *(nn.Tanhshrink, nn.Softshrink, nn.Hardshrink, nn.Threshold),
)
_CHANNEL_NORMS = (nn.modules.batchnorm._NormBase, nn.GroupNorm)


@criterion("synflow", needs=["example"])
def synflow(given: Given, *, example: Any = None, rounds: int = 100, sparsity: float = 0.99) -> dict[str, Tensor]:
    """The share of each weight in the flow R of an all-ones input through the linearised network.

    All weights are replaced by their absolute values and biases by zero. Norm layers only multiply by |γ|, because a
    BatchNorm's statistics could change signs or zero channels. Activation modules become the identity. Thus
    R = 1ᵀ ∏|W| 1. Everything runs in float64 on copies; the model itself does not change.

    With one round, weights are scored once. With more rounds, the weights with the lowest scores are removed along an
    exponential schedule: the share (1 − ``sparsity``)^(k / rounds) is kept after round k, and the kept weights are
    scored again. This prevents a layer from being removed completely. The score is then the round in which a weight
    was removed, plus its rank within the round: one ranking for every sparsity up to ``sparsity``.

    Args:
        given: The model, and batches or ``example`` for the shape of the inputs. Integer inputs (tokens) are kept.
        example: One input, a tuple of inputs, or a dict of keyword arguments, with a batch dimension.
        rounds: How often the weights are scored. 1 scores once.
        sparsity: The sparsity at the end of the schedule.
    """
    shares = kept_shares(rounds, sparsity)
    batch = _as_batch(example) if example is not None else next(iter(given.batches()))
    flow = _Flow(given.model, given.weights, given.forward, _ones(batch))
    with _linear(given.model):
        if rounds == 1:
            return dict(zip(given.weights, flow.scores(None), strict=True))
        return dict(zip(given.weights, _iterate(flow.scores, shares), strict=True))


def kept_shares(rounds: int, sparsity: float) -> list[float]:
    """The share that is kept after each round k, (1 − ``sparsity``)^(k / rounds)."""
    if rounds < 1 or not 0 <= sparsity < 1:
        raise ValueError(f"synflow takes rounds ≥ 1 and 0 ≤ sparsity < 1, not rounds={rounds}, sparsity={sparsity}.")
    return [(1 - sparsity) ** (k / rounds) for k in range(1, rounds + 1)]


def _iterate(scores_of: Callable[[list[Tensor] | None], list[Tensor]], shares: list[float]) -> list[Tensor]:
    """Remove weights round by round. The result ranks the weights by the order of their removal."""
    scores = scores_of(None)
    shapes, device = [s.shape for s in scores], scores[0].device
    total = sum(shape.numel() for shape in shapes)
    alive = np.arange(total)
    ranking = np.empty(total)
    for k, share in enumerate(shares, 1):
        if k > 1:
            mask = torch.zeros(total, dtype=torch.bool)
            mask[torch.from_numpy(alive)] = True
            scores = scores_of(_unflatten(mask.to(device), shapes))
        values = torch.cat([s.flatten().cpu() for s in scores]).numpy()[alive]
        kept = round(total * share) if k < len(shares) else 0  # the last round ranks the rest
        removed = lowest(values, len(alive) - kept)
        order = np.argsort(values[removed], kind="stable")
        ranking[alive[removed][order]] = k + np.arange(len(order)) / total
        alive = alive[~removed]
    return _unflatten(torch.from_numpy(ranking).to(device), shapes)


def _unflatten(flat: Tensor, shapes: list[torch.Size]) -> list[Tensor]:
    parts = torch.split(flat, [shape.numel() for shape in shapes])
    return [part.reshape(shape) for part, shape in zip(parts, shapes, strict=True)]


class _Flow(nn.Module):
    """R and its gradient, with float64 copies of the parameters in place of the model's own."""

    def __init__(self, model: nn.Module, weights: Mapping[str, nn.Parameter], forward: Forward, inputs: Any) -> None:
        super().__init__()
        self.network = model
        self._call_network, self._inputs, self._names = forward, inputs, list(weights)
        state: dict[str, Tensor] = {}
        for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
            tensor = tensor.detach()
            if tensor.is_floating_point():
                tensor = tensor.double().abs()
                if "bias" in name.rpartition(".")[2]:
                    tensor = torch.zeros_like(tensor)
            state[name] = tensor
        self._state = state

    def forward(self) -> Tensor:
        return self._call_network(self.network, self._inputs).sum()

    def scores(self, keep: list[Tensor] | None) -> list[Tensor]:
        """|θ| · ∂R/∂|θ| of each weight, with R over the weights in ``keep`` only."""
        weights = [self._state[name] for name in self._names]
        if keep is not None:
            weights = [weight * mask for weight, mask in zip(weights, keep, strict=True)]
        with torch.enable_grad():
            leaves = [weight.detach().requires_grad_() for weight in weights]
            state = self._state | dict(zip(self._names, leaves, strict=True))
            flow = functional_call(self, {f"network.{name}": tensor for name, tensor in state.items()}, ())
            if not bool(flow.isfinite()):
                raise ValueError(
                    f"the flow through the network is {flow.item()}, outside the range of float64. SynFlow needs "
                    "weights without NaN and a network that is not thousands of layers deep."
                )
            gradients = torch.autograd.grad(flow, leaves, allow_unused=True)
        return [
            torch.zeros_like(weight) if gradient is None else (gradient * weight).abs_()
            for weight, gradient in zip(weights, gradients, strict=True)
        ]


@contextmanager
def _linear(model: nn.Module) -> Iterator[None]:
    """Hooks make norm layers multiply by |γ| and activation modules the identity; they are removed afterwards."""
    handles = []
    for module in model.modules():
        if isinstance(module, _ACTIVATIONS):
            handles.append(module.register_forward_hook(lambda _module, inputs, _output: inputs[0]))
        elif "Norm" in type(module).__name__ and not list(module.children()):
            handles.append(module.register_forward_hook(_scale))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def _scale(module: nn.Module, inputs: tuple[Any, ...], _output: Any) -> Tensor:
    x: Tensor = inputs[0]
    weight = getattr(module, "weight", None)
    if weight is None:
        return x
    if isinstance(module, _CHANNEL_NORMS):
        weight = weight.reshape(1, -1, *(1,) * (x.ndim - 2))
    scaled: Tensor = x * weight
    return scaled


def _ones(batch: Any) -> Any:
    """The batch's first sample with ones for every floating-point input."""
    if isinstance(batch, Tensor):
        first = batch[:1] if batch.ndim else batch
        return torch.ones_like(first, dtype=torch.float64) if first.is_floating_point() else first
    if isinstance(batch, Mapping):
        return {key: _ones(value) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        return type(batch)(_ones(value) for value in batch)
    return batch


def _as_batch(example: Any) -> Any:
    """An example as a batch without targets."""
    if isinstance(example, Mapping):
        return example
    return (*example, None) if isinstance(example, tuple | list) else (example, None)
