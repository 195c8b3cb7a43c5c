"""One rule a layer type: from a module's inputs and output gradients to per-sample gradients in factored form.

A rule is a function ``rule(module, inputs, grads)`` that returns ``{parameter name: use}``. ``inputs`` has the
samples first, then perhaps further leading dimensions, then the layer's own: ``(B, …, *own)``; ``grads`` has the
same with K output gradients in front: ``(K, B, …, *own)``. A rule need not be trusted: before it is used, its
per-sample gradients are compared with autograd's (:mod:`shaver.curvature.plan`).
"""

from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.curvature.uses import Built, Dense, Outer, Rows, Shift, Use

Rule = Callable[[Any, Tensor, Tensor], dict[str, Use]]

_RULES: dict[type[nn.Module], tuple[str, Rule]] = {}


def register_rule(*types: type[nn.Module], name: str | None = None) -> Callable[[Rule], Rule]:
    """Teach the engine a fast rule for a module type of yours.

    Example:
        A layer with one gain a feature, y = x * gain::

            @shaver.curvature.register_rule(Gain)
            def gain(module, inputs, grads):
                return {"gain": Dense((grads * inputs).flatten(2, -2).sum(2))}   # (K, B, features)

    The rule is checked against autograd on the first batch; where it does not hold the generic rule steps in, and
    ``coverage()`` says so.
    """

    def decorate(rule: Rule) -> Rule:
        for kind in types:
            _RULES[kind] = (name or rule.__name__.replace("_", " "), rule)
        return rule

    return decorate


def rules_for(module: nn.Module) -> Iterator[tuple[str, Rule]]:
    """The rules that may fit a module, best first. A subclass with a forward of its own is not trusted to one."""
    for kind in type(module).__mro__:
        if kind in _RULES:
            if type(module).forward is kind.forward:
                yield _RULES[kind]
            break
    class_name = type(module).__name__
    own = dict(module.named_parameters(recurse=False))
    if class_name == "Conv1D" and "weight" in own and own["weight"].ndim == 2:
        yield "linear (transposed)", transposed_linear
    elif class_name.endswith("RMSNorm") and set(own) == {"weight"}:
        yield "rms norm", rms_norm_like
    elif len(own) == 1 and not list(module.children()) and next(iter(own.values())).numel() == 1:
        yield "scalar bias", scalar_bias
        yield "scalar scale", scalar_scale


# Weight matrices ------------------------------------------------------------------------------------------------


def _positions_last(values: Tensor, lead: int) -> Tensor:
    """``(lead dims, …, D)`` → ``(lead dims, D, T)``."""
    return values.flatten(lead, -2).transpose(-1, -2) if values.ndim > lead + 1 else values.unsqueeze(-1)


@register_rule(nn.Linear)
def linear(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """y = W x + b at every position."""
    a, b = _positions_last(inputs, 1), _positions_last(grads, 2)
    uses: dict[str, Use] = {"weight": Outer(lambda piece: a[piece], b, module.weight.shape)}
    if module.bias is not None:
        uses["bias"] = Shift(b)
    return uses


def transposed_linear(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """y = x W + b, with the weight stored (in, out)."""
    a, b = _positions_last(inputs, 1), _positions_last(grads, 2)
    uses: dict[str, Use] = {"weight": Outer(lambda piece: a[piece], b, module.weight.shape, transposed=True)}
    if getattr(module, "bias", None) is not None:
        uses["bias"] = Shift(b)
    return uses


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """A convolution is a linear layer on patches, one position an output pixel."""
    spatial = len(module.kernel_size)

    def patches(piece: slice) -> Tensor:
        chosen = inputs[piece]
        patch = _patches(module, chosen.flatten(0, -(spatial + 2)))  # (n·extra, C·kernel, L)
        if len(patch) == len(chosen):
            return patch
        return patch.reshape(len(chosen), -1, *patch.shape[1:]).transpose(1, 2).flatten(2)

    own = grads.flatten(-spatial)  # (K, B, …, O, L)
    b = own if own.ndim == 4 else own.flatten(2, -3).transpose(2, 3).flatten(3)
    built = None
    if spatial == 2 and own.ndim == 4:
        built = _grouped_kernel(module, inputs, grads) or _shifted_rows(module, inputs, grads)
    uses: dict[str, Use] = {"weight": Outer(patches, b, module.weight.shape, module.groups, built=built)}
    if module.bias is not None:
        uses["bias"] = Shift(b, module.groups)
    return uses


def _grouped_kernel(module: Any, inputs: Tensor, grads: Tensor) -> Built | None:
    """Per-sample gradients as the weight gradient of one convolution with a group for each sample.

    Measured 1.2 to 2.5 times as fast as patches on a CPU, between 8 channels and gradients of 160,000 numbers; slower
    outside, and in another precision, where the kernel is not the vectorised one.
    """
    out, channels = module.weight.shape[:2]
    left, right, top, bottom = module._reversed_padding_repeated_twice
    if not (
        inputs.device.type == "cpu"
        and inputs.dtype == grads.dtype == torch.float32
        and torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
        and (module.groups, left, top, module.padding_mode) == (1, right, bottom, "zeros")
        and min(out, channels) >= 8
        and module.weight.numel() <= 160_000
    ):
        return None
    size = grads.shape[-2:]

    def gradients(piece: slice, rows: Tensor) -> Tensor:
        images = inputs[piece]
        count = len(images)
        _, found, _ = torch.ops.aten.convolution_backward(
            rows.reshape(1, -1, *size),
            images.reshape(1, -1, *images.shape[2:]),
            module.weight.new_empty(1).expand(count * rows.shape[1], *module.weight.shape[1:]),
            None,
            module.stride,
            (top, left),
            module.dilation,
            False,
            (0, 0),
            count,
            (False, True, False),
        )
        return cast(Tensor, found.view(1, count, -1, *module.weight.shape[1:]))

    return Built(gradients, lambda total: total[0], module.weight.numel())


def _shifted_rows(module: Any, inputs: Tensor, grads: Tensor) -> Built | None:
    """Per-sample gradients from patches one pixel high, which serve every row of the kernel by a shift.

    The copy is smaller by the kernel's height, the products as many times more: measured 1.2 to 2 times as fast on a
    CPU, unless they become narrow and many.
    """
    channels, (height, width) = module.in_channels, module.kernel_size
    if inputs.device.type != "cpu" or module.groups > 1 or module.stride[0] > 1 or height == 1:
        return None
    rows_out, columns_out = grads.shape[-2:]

    def gradients(piece: slice, rows: Tensor) -> Tensor:
        images = _padded(module, inputs[piece])
        count, _, tall, _ = images.shape
        steps = images.stride()
        view = images.as_strided(
            (count, channels, width, tall, columns_out),
            (*steps[:2], steps[3] * module.dilation[1], steps[2], steps[3] * module.stride[1]),
        )
        flat = view.reshape(count, channels * width, tall * columns_out).transpose(1, 2)
        found = rows.new_empty(height, count, rows.shape[1], channels * width)
        for row in range(height):
            start = row * module.dilation[0]
            torch.bmm(rows, flat[:, start * columns_out : (start + rows_out) * columns_out], out=found[row])
        return found

    def weights(total: Tensor) -> Tensor:
        return total.view(height, -1, channels, width).permute(1, 2, 0, 3)

    # everything that is held, and four times over: a quarter of a tile stays in a core's own cache
    numbers = module.weight.numel() + (module.out_channels + channels * width) * rows_out * columns_out
    return Built(gradients, weights, 4 * numbers, up_to=8 if channels * width < 15 else 64)


def _padded(module: Any, images: Tensor) -> Tensor:
    padding = module._reversed_padding_repeated_twice
    if any(padding):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        images = F.pad(images, padding, mode=mode)
    return images.contiguous()


def _patches(module: Any, images: Tensor) -> Tensor:
    """``(N, C, *spatial)`` → ``(N, C·kernel, L)``: a strided view and one copy, faster than im2col on the CPU."""
    kernel, stride, dilation = module.kernel_size, module.stride, module.dilation
    images = _padded(module, images)
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


@register_rule(nn.Embedding)
def embedding(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """Row look-up."""
    index, rows = inputs.flatten(1), grads.flatten(2, -2) if grads.ndim > 3 else grads.unsqueeze(2)
    if inputs.ndim == 1:
        index = inputs.unsqueeze(1)
    return {"weight": Rows(index, rows, module.weight.shape, module.padding_idx)}


# Norms ----------------------------------------------------------------------------------------------------------


def _affine(module: Any, normalised: Tensor, grads: Tensor) -> dict[str, Use]:
    """y = w ∘ x̂ + b over trailing dimensions, summed over everything between the samples and those."""
    keep = module.weight.ndim
    between = tuple(range(2, grads.ndim - keep))

    def total(values: Tensor) -> Tensor:
        return values.sum(between) if between else values

    uses: dict[str, Use] = {"weight": Dense(total(grads * normalised))}
    if getattr(module, "bias", None) is not None:
        uses["bias"] = Dense(total(grads))
    return uses


@register_rule(nn.LayerNorm)
def layer_norm(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """Affine part of layer norm."""
    return _affine(module, F.layer_norm(inputs, module.normalized_shape, None, None, module.eps), grads)


@register_rule(nn.RMSNorm)
def rms_norm(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """Scale of root-mean-square norm."""
    return _affine(module, F.rms_norm(inputs, module.normalized_shape, None, module.eps), grads)


def rms_norm_like(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """The same by another library's name, with its ``variance_epsilon`` or ``eps``."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6))
    return _affine(module, F.rms_norm(inputs, module.weight.shape, None, eps), grads)


def _channels(module: Any, normalised: Tensor, grads: Tensor, own: int) -> dict[str, Use]:
    """y = w_c x̂ + b_c for ``(…, C, *spatial)`` with ``own`` dimensions from C on."""

    def total(values: Tensor) -> Tensor:  # (K, B, …, C, *spatial) → (K, B, C)
        values = values.flatten(-own + 1).sum(-1) if own > 1 else values
        return values.flatten(2, -2).sum(2) if values.ndim > 3 else values

    uses: dict[str, Use] = {"weight": Dense(total(grads * normalised))}
    if module.bias is not None:
        uses["bias"] = Dense(total(grads))
    return uses


_BATCH_NORM_DIMS = {nn.BatchNorm1d: (2, 3), nn.BatchNorm2d: (4,), nn.BatchNorm3d: (5,)}


@register_rule(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
def batch_norm(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """Affine part of batch norm; statistics count as constants (running in evaluation, the batch's in training)."""
    dims = next(d for kind, d in _BATCH_NORM_DIMS.items() if isinstance(module, kind))
    own = min(max(dims), inputs.ndim) - 1
    flat = inputs.flatten(0, -(own + 1))
    if module.training or module.running_mean is None:
        normalised = F.batch_norm(flat, None, None, None, None, True, 0.0, module.eps)
    else:
        normalised = F.batch_norm(flat, module.running_mean, module.running_var, None, None, False, 0.0, module.eps)
    return _channels(module, normalised.view_as(inputs), grads, own)


@register_rule(nn.GroupNorm)
def group_norm(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """Affine part of group norm."""
    normalised = F.group_norm(inputs, module.num_groups, None, None, module.eps)
    return _channels(module, normalised, grads, inputs.ndim - 1)


@register_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """Affine part of instance norm."""
    batch_statistics = module.training or not module.track_running_stats
    mean, variance = (None, None) if batch_statistics else (module.running_mean, module.running_var)
    normalised = F.instance_norm(inputs, mean, variance, None, None, batch_statistics, 0.0, module.eps)
    return _channels(module, normalised, grads, inputs.ndim - 1)


# Scalars --------------------------------------------------------------------------------------------------------


def _scalar(module: nn.Module, per_sample: Tensor) -> dict[str, Use]:
    name, parameter = next(module.named_parameters(recurse=False))
    return {name: Dense(per_sample.reshape(*per_sample.shape[:2], *parameter.shape))}


def scalar_bias(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """y = x + b with one number b."""
    return _scalar(module, grads.flatten(2).sum(2) if grads.ndim > 2 else grads)


def scalar_scale(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """y = s · x with one number s."""
    return scalar_bias(module, inputs, grads * inputs)
