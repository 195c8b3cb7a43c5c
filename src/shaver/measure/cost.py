"""Cost of a network: parameters, bytes, FLOPs, time and memory; and its quality and cost together."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from shaver.batches import check_values, naming_inputs
from shaver.likelihoods import Likelihood
from shaver.measure.example import Example
from shaver.measure.flops import flops
from shaver.measure.latency import latency
from shaver.measure.memory import peak_memory
from shaver.measure.quality import quality

#: The batch sizes at which latency is measured.
BATCH_SIZES = (1, 128)


@dataclass(frozen=True)
class Cost:
    """Cost of a network.

    Attributes:
        parameters: Number of weights; a weight shared by several layers counts once.
        nonzeros: Number of weights that are not zero.
        bytes_dense: Bytes of parameters and saved buffers in dense form.
        bytes_sparse: The same with each parameter in the smallest of three forms: dense; its non-zero values and a
            bit mask of ⌈n/8⌉ bytes; its non-zero values and an int32 index for each. File headers are not included.
        flops: FLOPs per sample, 2 per multiply-add; :mod:`shaver.measure.flops` lists what is counted.
        flops_sparse: FLOPs per sample with a non-zero weight. On usual hardware zeros in a dense network save no time.
        peak_memory: Largest number of bytes in use during a call with the example; see :mod:`shaver.measure.memory`.
    """

    parameters: int
    nonzeros: int
    bytes_dense: int
    bytes_sparse: int
    flops: int
    flops_sparse: int
    peak_memory: int


def cost(model: nn.Module, example: Example) -> Cost:
    """Measure the cost of a network; :func:`shaver.measure.latency` measures its time.

    Example:
        >>> cost(shaver.zoo.build("lenet"), torch.zeros(1, 1, 28, 28))
        Cost(parameters=60170, nonzeros=60170, bytes_dense=240680, bytes_sparse=240680, flops=463440, ...)

    Args:
        model: The network. Weights, modes and random state do not change.
        example: Inputs of at least one sample: a tensor, a tuple of positional or a dict of keyword arguments.
    """
    check_values(model, "cost")
    with naming_inputs(model, tree_leaves(example)):
        counted = flops(model, example)
    return Cost(
        **_size(model),
        flops=counted.dense,
        flops_sparse=counted.sparse,
        peak_memory=peak_memory(model, example),
    )


def summary(
    model: nn.Module,
    batches: Iterable[Any] | None = None,
    example: Example | None = None,
    *,
    likelihood: str | Likelihood = "classification",
    latencies: Iterable[int] = BATCH_SIZES,
    seconds: float = 3.0,
) -> dict[str, Any]:
    """Quality and cost of a network as one flat row: quality if there are data, FLOPs and time if there is an input.

    Example:
        >>> summary(model, test_loader, x)
        {'nll': ..., 'accuracy': ..., 'parameters': ..., 'flops': ..., 'latency_1': ..., 'latency_128': ...}

    Args:
        model: The network. Weights, modes and random state do not change.
        batches: What the quality is measured on, as for :func:`shaver.measure.quality`.
        example: Inputs, as for :func:`cost`.
        likelihood: What the outputs mean.
        latencies: Batch sizes of the timed calls.
        seconds: Maximum number of seconds per batch size.
    """
    row: dict[str, Any] = {}
    if batches is not None:
        row |= quality(model, batches, likelihood=likelihood).as_dict()
        del row["count"]
    row |= _size(model)
    if example is not None:
        counted = flops(model, example)
        row |= {"flops": counted.dense, "flops_sparse": counted.sparse}
        for size in latencies:
            row[f"latency_{size}"] = latency(model, example, batch_size=size, seconds=seconds).median
    return row


def _size(model: nn.Module) -> dict[str, int]:
    parameters = {id(p): p for p in model.parameters()}
    saved = {id(t): t for t in model.state_dict(keep_vars=True).values() if isinstance(t, Tensor)}
    buffers = sum(_bytes(tensor) for key, tensor in saved.items() if key not in parameters)
    return {
        "parameters": sum(p.numel() for p in parameters.values()),
        "nonzeros": sum(_nonzeros(p) for p in parameters.values()),
        "bytes_dense": sum(map(_bytes, parameters.values())) + buffers,
        "bytes_sparse": sum(map(_sparse_bytes, parameters.values())) + buffers,
    }


def _nonzeros(tensor: Tensor) -> int:
    return int(tensor.detach().count_nonzero())


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _sparse_bytes(tensor: Tensor) -> int:
    nonzeros = _nonzeros(tensor)
    mask, indices = -(-tensor.numel() // 8), 4 * nonzeros
    return min(_bytes(tensor), nonzeros * tensor.element_size() + min(mask, indices))
