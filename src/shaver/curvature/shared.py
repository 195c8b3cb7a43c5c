"""Weight matrices on a step that is looked at: the weight's gradient is the sum of the gradients that a look squares.

So both come from one computation. The layer's forward pass is its own; its output is handed on by a node whose backward
pass takes the sum, where the look has left one, and otherwise does what the layer's own would have done.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_modules

from shaver.curvature.rules import Rule, convolution, linear, transposed_linear

#: ``(module, output gradient, inputs, weight, which of the three)`` → gradients of inputs, weight and bias.
Backward = Callable[[Any, Tensor, Tensor, Tensor, tuple[bool, bool, bool]], tuple[Tensor | None, ...]]


class Sum:
    """Where a look leaves the sum of a weight's per-sample gradients for the backward pass that is to come next."""

    gradient: Tensor | None = None


def shared(module: nn.Module, rule: Rule, inputs: Tensor, output: Tensor, found: Sum) -> Tensor | None:
    """The output of a layer by another node of the graph, which uses what will be in ``found``.

    Returns:
        None where the layer's own node has to stay: somebody else may hold on to it (other hooks, checkpointed
        activations), or the numbers are not the layer's own (mixed precision, padding outside the convolution).
    """
    weight, bias = module._parameters.get("weight"), module._parameters.get("bias")
    if (
        weight is None
        or len(module._forward_hooks) > 1
        or module._backward_hooks
        or torch_modules._global_forward_hooks
        or not inputs.dtype == weight.dtype == output.dtype
        or weight.dtype not in (torch.float32, torch.float64)
        or inputs.ndim < 3  # one position: the squares are a product of their own
        or torch.is_autocast_enabled(inputs.device.type)
        or torch._C._autograd._top_saved_tensors_default_hooks(False) is not None
    ):
        return None
    backward = _BACKWARD.get(rule)
    if backward is None or (rule is convolution and not _is_plain(module, inputs)):
        return None
    return _Node.apply(output.data, found, module, backward, inputs, weight, bias)  # type: ignore[no-any-return, no-untyped-call]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, found: Sum, module: Any, backward: Backward, inputs: Tensor, weight: Tensor, bias: Any
    ) -> Tensor:
        ctx.found, ctx.module, ctx.through = found, module, backward
        ctx.save_for_backward(inputs, weight)
        ctx.mark_dirty(values)  # not a view: an activation may work in place on it
        return values

    @staticmethod
    def backward(ctx: Any, grads: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        inputs, weight = ctx.saved_tensors
        *_, for_inputs, for_weight, for_bias = ctx.needs_input_grad
        summed, ctx.found.gradient = ctx.found.gradient, None
        if summed is None or torch.is_grad_enabled():  # the latter: a graph of the gradients is wanted
            return (
                None,
                None,
                None,
                None,
                *ctx.through(ctx.module, grads, inputs, weight, (for_inputs, for_weight, for_bias)),
            )
        to_inputs, _, to_bias = ctx.through(ctx.module, grads, inputs, weight, (for_inputs, False, for_bias))
        return None, None, None, None, to_inputs, summed if for_weight else None, to_bias


def _is_plain(module: Any, inputs: Tensor) -> bool:
    return (
        module.padding_mode == "zeros"
        and not isinstance(module.padding, str)
        and inputs.ndim == len(module.kernel_size) + 2
    )


def _convolution(
    module: Any, grads: Tensor, inputs: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    to_inputs = to_weight = None
    if wanted[0] or wanted[1]:
        to_inputs, to_weight, _ = torch.ops.aten.convolution_backward(
            grads, inputs, weight, None, module.stride, module.padding, module.dilation,
            False, [0] * len(module.stride), module.groups, (wanted[0], wanted[1], False),
        )  # fmt: skip
    # apart: asked for the bias alone the kernel computes the weight's gradient too
    return to_inputs, to_weight, grads.transpose(0, 1).flatten(1).sum(1) if wanted[2] else None


def _linear(
    module: Any, grads: Tensor, inputs: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    rows = grads.flatten(0, -2)
    return (
        grads @ weight if wanted[0] else None,
        rows.t() @ inputs.flatten(0, -2) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


def _transposed_linear(
    module: Any, grads: Tensor, inputs: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]
) -> tuple[Tensor | None, ...]:
    to_inputs, to_weight, to_bias = _linear(module, grads, inputs, weight.t(), wanted)
    return to_inputs, to_weight.t() if to_weight is not None else None, to_bias


_BACKWARD: dict[Rule, Backward] = {
    linear: _linear,
    transposed_linear: _transposed_linear,
    convolution: _convolution,
}
