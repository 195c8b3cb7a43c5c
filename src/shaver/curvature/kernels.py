"""Sums over per-sample gradients, computed in the fastest way for each shape, and the thresholds that select it.

``python benchmarks/kernels.py`` measures both sides of every threshold in this file. Run it before changing one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

#: Bytes of per-sample gradients built at a time, so that they stay in a core's cache. (benchmarks/kernels.py tile)
TILE = 4 * 2**20
#: A convolution grouped by samples beats patches from this many channels … (benchmarks/kernels.py grouped)
GROUPED_CHANNELS = 8
#: … up to this many weights. (benchmarks/kernels.py grouped)
GROUPED_WEIGHTS = 160_000
#: Shifted rows beat patches up to this many products K·O: the first number with fewer than ``SHIFTED_NARROW`` inputs
#: per kernel row, the second from there on. (benchmarks/kernels.py shifted)
SHIFTED_PRODUCTS, SHIFTED_NARROW = (8, 64), 15
#: Σ v vᵀ as one batched product below this size. (benchmarks/kernels.py outer)
OUTER_SMALL = 128
#: Σ v vᵀ sample by sample from this many positions on. (benchmarks/kernels.py outer)
OUTER_POSITIONS = 256
#: If the outputs of all layers have more elements than this (256 MiB in float32), an online measurement squares each
#: layer's gradient when it arrives instead of keeping all of them. (benchmarks/curvature_memory.py)
STREAMED = 2**26


@dataclass(frozen=True)
class Kernel:
    """A way to compute per-sample gradients of a weight without patches."""

    # A function from a slice of samples and their output gradients (n, K·O, T) to the gradients. The samples
    # are the second dimension of the result, so that sums over samples need no copy.
    gradients: Callable[[slice, Tensor], Tensor]
    weights: Callable[[Tensor], Tensor]  # A function from such a sum over samples to (K·O, *shape[1:])
    numbers: int  # number of elements in a tile per sample and output gradient
    up_to: float = math.inf  # the largest K·O for which this is the fastest way


def tiles(batch: int, width: int, numbers: int, beside: int = 0) -> Iterator[slice]:
    """Slices of ``batch`` samples that each fit a tile, with ``numbers`` values of ``width`` bytes per sample.

    A tile may be larger if the result, ``beside`` values, is larger than :data:`TILE` anyway.
    """
    step = min(batch, max(1, max(TILE, beside * width) // (numbers * width)))
    return (slice(start, min(start + step, batch)) for start in range(0, batch, step))


def convolution_kernel(layer: Any, inputs: Tensor, grads: Tensor) -> Kernel | None:
    """The kernel for a two-dimensional convolution, or None if patches are faster."""
    return _grouped_convolution(layer, inputs, grads) or _shifted_rows(layer, inputs, grads)


def _grouped_convolution(layer: Any, inputs: Tensor, grads: Tensor) -> Kernel | None:
    """Per-sample gradients as the weight gradient of one convolution with one group per sample.

    1.2 to 2.5 times as fast as patches on a CPU in single precision; other precisions have no vectorised kernel.
    """
    shape = kernel_shape(layer)
    left, right, top, bottom = layer._reversed_padding_repeated_twice
    if not (
        inputs.device.type == "cpu"
        and inputs.dtype == grads.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and (layer.groups, left, top, layer.padding_mode) == (1, right, bottom, "zeros")
        and min(shape[:2]) >= GROUPED_CHANNELS
        and shape.numel() <= GROUPED_WEIGHTS
    ):
        return None
    size = grads.shape[-2:]
    stride, dilation = layer.stride, layer.dilation

    def gradients(piece: slice, rows: Tensor) -> Tensor:
        images = inputs[piece]
        count = len(images)
        _, found, _ = torch.ops.aten.convolution_backward(
            rows.reshape(1, -1, *size), images.reshape(1, -1, *images.shape[2:]),
            rows.new_empty(1).expand(count * rows.shape[1], *shape[1:]), None, stride, (top, left), dilation,
            False, (0, 0), count, (False, True, False),
        )  # fmt: skip
        return cast(Tensor, found.view(1, count, -1, *shape[1:]))

    return Kernel(gradients, lambda total: total[0], shape.numel())


def _shifted_rows(layer: Any, inputs: Tensor, grads: Tensor) -> Kernel | None:
    """Per-sample gradients from patches one pixel high, which are shifted for each row of the kernel.

    With a kernel of height h the copy is h times smaller and there are h times as many products. This is 1.2 to 2
    times as fast as patches on a CPU, unless the products are many and narrow.
    """
    channels, (height, width) = layer.in_channels, layer.kernel_size
    if inputs.device.type != "cpu" or layer.groups > 1 or layer.stride[0] > 1 or height == 1:
        return None
    rows_out, columns_out = grads.shape[-2:]

    def gradients(piece: slice, rows: Tensor) -> Tensor:
        images = padded(layer, inputs[piece])
        count, _, tall, _ = images.shape
        steps = images.stride()
        view = images.as_strided(
            (count, channels, width, tall, columns_out),
            (*steps[:2], steps[3] * layer.dilation[1], steps[2], steps[3] * layer.stride[1]),
        )
        flat = view.reshape(count, channels * width, tall * columns_out).transpose(1, 2)
        found = rows.new_empty(height, count, rows.shape[1], channels * width)
        for row in range(height):
            start = row * layer.dilation[0]
            torch.bmm(rows, flat[:, start * columns_out : (start + rows_out) * columns_out], out=found[row])
        return found

    def weights(total: Tensor) -> Tensor:
        return total.view(height, -1, channels, width).permute(1, 2, 0, 3)

    # four times the memory in use: a quarter of a tile stays in a core's own cache
    numbers = channels * layer.out_channels * height * width
    numbers += (layer.out_channels + channels * width) * rows_out * columns_out
    up_to = SHIFTED_PRODUCTS[channels * width >= SHIFTED_NARROW]
    return Kernel(gradients, weights, 4 * numbers, up_to)


def kernel_shape(layer: Any) -> torch.Size:
    """The shape of a convolution's weight. The weight itself is not read, because it may be parametrized."""
    return torch.Size((layer.out_channels, layer.in_channels // layer.groups, *layer.kernel_size))


def padded(layer: Any, images: Tensor) -> Tensor:
    """A convolution's input with its padding."""
    padding = layer._reversed_padding_repeated_twice
    if any(padding):
        mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
        images = F.pad(images, padding, mode=mode)
    return images.contiguous()


def patches(layer: Any, images: Tensor) -> Tensor:
    """``(N, C, *spatial)`` → ``(N, C·kernel, L)``: a strided view and one copy, faster than im2col on the CPU."""
    kernel, stride, dilation = layer.kernel_size, layer.stride, layer.dilation
    images = padded(layer, images)
    count, channels, *size = images.shape
    outs = [(n - d * (k - 1) - 1) // s + 1 for n, k, s, d in zip(size, kernel, stride, dilation, strict=True)]
    steps = images.stride()[2:]
    view = images.as_strided(
        (count, channels, *kernel, *outs),
        (
            *images.stride()[:2],
            *(step * d for step, d in zip(steps, dilation, strict=True)),
            *(step * s for step, s in zip(steps, stride, strict=True)),
        ),
    )
    return view.reshape(count, channels * torch.Size(kernel).numel(), torch.Size(outs).numel())


def outer_sum(values: Tensor, groups: int) -> Tensor:
    """Σ_n Σ_t v vᵀ for ``(N, g·D, T)``, one matrix per group: ``(g, D, D)``.

    With one group, only the lower triangle is computed and then mirrored. Positions that are contiguous (tokens) or
    many are used in place; others are copied into one matrix first.
    """
    _, size, positions = values.shape
    if groups > 1:
        flat = grouped(values, 1, groups).permute(1, 2, 0, 3).flatten(2)
        return flat @ flat.transpose(1, 2)
    by_position = values.transpose(1, 2)
    rows: Sequence[Tensor] | Tensor  # of (D, positions) matrices
    if by_position.is_contiguous():
        rows = [by_position.flatten(0, 1).t()]
    elif size < OUTER_SMALL and size <= positions:
        return torch.bmm(values, by_position).sum(0, keepdim=True)
    elif positions >= OUTER_POSITIONS:
        rows = values
    else:
        rows = [values.transpose(0, 1).flatten(1)]
    total = values.new_zeros(size, size)
    step = max(64, size // 8)
    for matrix in rows:
        for start in range(0, size, step):
            total[start : start + step, : start + step].addmm_(matrix[start : start + step], matrix[: start + step].t())
    for start in range(step, size, step):
        total[:start, start : start + step] = total[start : start + step, :start].t()
    return total.unsqueeze(0)


def grouped(values: Tensor, dim: int, groups: int) -> Tensor:
    """Dimension ``dim`` of size g·D as two, (g, D)."""
    return values.reshape(*values.shape[:dim], groups, -1, *values.shape[dim + 1 :])
