"""Sparse inference: very sparse layers compute with their nonzero weights only, where that is measured to be faster."""

import copy
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from shaver.batches import check_network, naming_inputs, tensors_in
from shaver.measure.evaluating import evaluating
from shaver.measure.example import Example, call
from shaver.naming import check_count, check_number, shown

#: These modules read the weights of their layers without calling the layers, so a replaced layer would not work.
_CLOSED = (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer, nn.MultiheadAttention)


class _Compressed(nn.Module):
    """A layer whose weight is a compressed-sparse-row matrix: only the stored weights are used."""

    def __init__(self, layer: nn.Linear | nn.Conv2d) -> None:
        super().__init__()
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*Sparse CSR tensor support is in beta.*")
            self.register_buffer("weight", layer.weight.detach().flatten(1).to_sparse_csr())
        self.register_buffer("bias", None if layer.bias is None else layer.bias.detach())

    def times(self, columns: Tensor) -> Tensor:
        """W · columns + b, one output per row."""
        weight, bias = self.get_buffer("weight"), self.bias
        if bias is None:
            return weight @ columns
        assert isinstance(bias, Tensor)
        return torch.addmm(bias.unsqueeze(1), weight, columns)

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        weight = self.get_buffer("weight")
        outputs, inputs = weight.shape
        return f"{inputs}, {outputs}, nonzero={weight.values().numel()}"


class SparseLinear(_Compressed):
    """A linear layer: y = W x + b over the stored weights only."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__(layer)
        self.in_features, self.out_features = layer.in_features, layer.out_features

    def forward(self, inputs: Tensor) -> Tensor:
        """Like ``nn.Linear``, without gradients for the weights."""
        columns = inputs.reshape(-1, self.in_features).t()
        return self.times(columns).t().reshape(*inputs.shape[:-1], self.out_features)


class SparsePointwise(_Compressed):
    """A 1×1 convolution, as a matrix over the channels."""

    def __init__(self, layer: nn.Conv2d) -> None:
        super().__init__(layer)
        self.in_channels, self.out_channels, self.stride = layer.in_channels, layer.out_channels, layer.stride

    def forward(self, inputs: Tensor) -> Tensor:
        """Like ``nn.Conv2d``, without gradients for the weights."""
        if self.stride != (1, 1):
            inputs = inputs[..., :: self.stride[0], :: self.stride[1]]
        channels = inputs.movedim(-3, 0)
        outputs = self.times(channels.reshape(self.in_channels, -1))
        return outputs.reshape(self.out_channels, *channels.shape[1:]).movedim(0, -3).contiguous()

    def extra_repr(self) -> str:
        """Shown by ``print(model)``."""
        return f"{super().extra_repr()}, stride={self.stride}"


@dataclass(frozen=True)
class SparseLayer:
    """The measurement of one candidate layer.

    Attributes:
        name: The layer's name in the network.
        sparsity: The share of its weights that is zero.
        dense_seconds: Median time of the dense layer, in seconds, on its inputs for the example.
        sparse_seconds: Median time of the sparse layer, in seconds, on the same inputs.
        swapped: Whether the sparse layer is used.
    """

    name: str
    sparsity: float
    dense_seconds: float
    sparse_seconds: float
    swapped: bool

    @property
    def speedup(self) -> float:
        """Dense over sparse time."""
        return self.dense_seconds / self.sparse_seconds


class SparseInference(nn.Module):
    """A network for inference, called like the original, with its measurements. ``print`` shows a table.

    Attributes:
        model: A copy of the network in eval mode with the swapped layers; all other tensors are shared.
        layers: One row per candidate layer.
        dense_seconds: Median time of the original network on the example, in seconds.
        sparse_seconds: Median time of ``model`` on the example, in seconds.
    """

    def __init__(
        self, model: nn.Module, layers: tuple[SparseLayer, ...], dense_seconds: float, sparse_seconds: float
    ) -> None:
        super().__init__()
        self.model, self.layers = model, layers
        self.dense_seconds, self.sparse_seconds = dense_seconds, sparse_seconds
        self.eval()

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """The outputs of the original network, up to rounding."""
        return self.model(*inputs, **named)

    @property
    def speedup(self) -> float:
        """Dense over sparse time of the whole network."""
        return self.dense_seconds / self.sparse_seconds

    def __str__(self) -> str:
        width = max([5, *(len(layer.name) for layer in self.layers)])
        rows = [f"{'layer':<{width}}  sparsity   dense ms  sparse ms  speed-up"]
        for layer in self.layers:
            times = f"{layer.dense_seconds * 1e3:9.3f}  {layer.sparse_seconds * 1e3:9.3f}  {layer.speedup:7.2f}x"
            verdict = "swapped" if layer.swapped else "kept"
            rows.append(f"{layer.name:<{width}}  {layer.sparsity:8.4f}  {times}  {verdict}")
        times = f"{self.dense_seconds * 1e3:9.3f}  {self.sparse_seconds * 1e3:9.3f}  {self.speedup:7.2f}x"
        return "\n".join([*rows, f"{'whole':<{width}}  {'':8}  {times}"])


def sparse_inference(
    model: nn.Module,
    example: Any,
    *,
    from_sparsity: float = 0.5,
    margin: float = 1.1,
    repeats: int = 10,
    tolerance: float = 1e-5,
) -> SparseInference:
    """Compute linear layers and 1×1 convolutions with their nonzero weights only, where that is faster.

    Example::

        fast = shaver.sparse_inference(model, x)
        y = fast(x)
        print(fast)                  # measured per layer

    Each layer is timed both ways on its inputs for ``example``, with torch's current number of threads, so pass an
    example of the batch size that you will use. Layers inside torch's own transformer blocks stay dense, because those
    blocks read their weights directly.

    Args:
        model: A pruned network on the CPU; it does not change.
        example: An input, a tuple of inputs, or a dict of keyword arguments.
        from_sparsity: Only layers with at least this share of zeros are tried.
        margin: A layer is swapped if its sparse form is this many times faster.
        repeats: Number of timed calls per form.
        tolerance: Largest difference of the outputs, relative to the largest output or 1.

    Raises:
        RuntimeError: The outputs differ by more than the tolerance.
    """
    check_network(model, "sparse_inference")
    check_count("repeats", repeats)
    check_number("from_sparsity", from_sparsity, least=0, most=1)
    check_number("tolerance", tolerance, least=0)
    if not tensors_in(example):
        kinds = "an input, a tuple of inputs or a dict"
        raise TypeError(f"sparse_inference is timed on an example: {kinds}, not {shown(example)}.")
    with naming_inputs(model, tensors_in(example)), evaluating(model):
        received = _inputs_of_candidates(model, example, from_sparsity)
        # A copy of the modules with the same tensors.
        fast = copy.deepcopy(model, {id(tensor): tensor for tensor in [*model.parameters(), *model.buffers()]}).eval()
        rows = []
        for name, layer_input in received.items():
            layer = model.get_submodule(name)
            kind = _sparse_kind(layer)
            assert kind is not None
            sparse = kind(layer)
            dense_seconds, sparse_seconds = _race(partial(layer, layer_input), partial(sparse, layer_input), repeats)
            swapped = dense_seconds > margin * sparse_seconds
            if swapped:
                for alias, module in model.named_modules(remove_duplicate=False):
                    if module is layer:
                        fast.set_submodule(alias, sparse)
            rows.append(SparseLayer(name, _sparsity(layer), dense_seconds, sparse_seconds, swapped))
        before, after = (_outputs(call(network, example)) for network in (model, fast))
        off = float((before - after).abs().max() / before.abs().max().clamp_min(1)) if before.numel() else 0.0
        if not off <= tolerance:
            raise RuntimeError(f"sparse outputs differ from dense ones by {off:.2g}, more than {tolerance:g}.")
        dense_seconds, sparse_seconds = _race(partial(call, model, example), partial(call, fast, example), repeats)
    return SparseInference(fast, tuple(rows), dense_seconds, sparse_seconds)


def _inputs_of_candidates(model: nn.Module, example: Example, from_sparsity: float) -> dict[str, Tensor]:
    """The inputs of each sufficiently sparse layer in one forward pass."""
    closed = {id(child) for module in model.modules() if isinstance(module, _CLOSED) for child in module.modules()}
    inputs: dict[str, Tensor] = {}

    def note(name: str, _: nn.Module, args: tuple[Any, ...]) -> None:
        inputs.setdefault(name, args[0])

    with ExitStack() as hooks:
        for name, module in model.named_modules():
            if not name or id(module) in closed or _sparse_kind(module) is None:
                continue
            if _sparsity(module) >= from_sparsity:
                hooks.enter_context(module.register_forward_pre_hook(partial(note, name)))
        call(model, example)
    return inputs


def _sparse_kind(module: nn.Module) -> Callable[[Any], nn.Module] | None:
    """The class of a layer's sparse form; ``None`` if there is none."""
    if type(module) is nn.Linear:
        return SparseLinear
    if type(module) is not nn.Conv2d:
        return None
    is_pointwise = module.kernel_size == (1, 1) and module.groups == 1 and module.padding in ((0, 0), "valid")
    return SparsePointwise if is_pointwise else None


def _sparsity(layer: nn.Module) -> float:
    weight = layer.get_parameter("weight")
    return 1 - int(weight.detach().count_nonzero()) / max(1, weight.numel())


def _race(first: Callable[[], Any], second: Callable[[], Any], repeats: int) -> tuple[float, float]:
    """Median seconds of each function, called alternately so that both see the same load."""
    times: tuple[list[float], list[float]] = ([], [])
    for turn in range(repeats + 1):
        for function, record in zip((first, second), times, strict=True):
            start = time.perf_counter()
            function()
            if turn:  # the first turn is a warm-up
                record.append(time.perf_counter() - start)
    return median(times[0]), median(times[1])


def _outputs(outputs: Any) -> Tensor:
    """All floating-point outputs as one flat tensor, for any nesting."""
    if isinstance(outputs, Mapping):
        outputs = tuple(outputs.values())
    if isinstance(outputs, tuple | list):
        return torch.cat([torch.zeros(0, dtype=torch.float64), *map(_outputs, outputs)])
    is_floating = isinstance(outputs, Tensor) and outputs.is_floating_point()
    return outputs.flatten().double() if is_floating else torch.zeros(0, dtype=torch.float64)
