"""Weight matrices on a step that is looked at: the weight's gradient is the sum of the gradients that a look squares.

So both come from one computation. The layer's forward pass is its own; its output is handed on by a node whose backward
pass takes the sum, where the look has left one, and otherwise does what the layer's own would have done.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn.modules import module as torch_modules

#: Gradients of a layer's inputs, weight and bias, None where they are not wanted.
Three = tuple[Tensor | None, Tensor | None, Tensor | None]
#: ``(module, output gradient, inputs, weight, which of the three are wanted)`` → those.
Backward = Callable[[Any, Tensor, Any, Any, tuple[bool, bool, bool]], Three]


class Sum:
    """Where a look leaves the sum of a weight's per-sample gradients for the backward pass that is to come next.

    Attributes:
        gradient: The sum.
        of: The output gradient it was made of: a hook may have put another in its place since.
    """

    gradient: Tensor | None = None
    of: Tensor | None = None

    def take(self, grads: Tensor) -> Tensor | None:
        """The sum if it is that of ``grads``; it is there once."""
        found = self.gradient if self.of is grads else None
        self.gradient = self.of = None
        return found


def shared(module: nn.Module, inputs: Tensor, output: Tensor) -> tuple[Tensor, Sum] | None:
    """The output of a layer by another node of the graph, and where that node will look for a sum.

    Returns:
        None where the layer's own node has to stay: the layer is not exactly one of torch's, somebody else may hold on
        to the node (other hooks, checkpointed activations), or the numbers are not the layer's own (mixed precision,
        padding outside the convolution).
    """
    backward, weight = _backward_of(module), module._parameters.get("weight")
    if (
        backward is None
        or weight is None
        or inputs.ndim < 3  # one position: the squares are a product of their own
        or not inputs.dtype == weight.dtype == output.dtype
        or weight.dtype not in (torch.float32, torch.float64)
        or not {type(inputs), type(weight)} <= {Tensor, nn.Parameter}
        or _is_observed(module)
        or torch.is_autocast_enabled(inputs.device.type)
    ):
        return None
    if backward is _convolution and inputs.ndim != weight.ndim:  # an image without a batch
        return None
    found = Sum()
    arguments = (output.data, found, module, backward, inputs, weight, module._parameters.get("bias"))
    return _Node.apply(*arguments), found  # type: ignore[no-untyped-call]


class _Node(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, found: Sum, module: Any, backward: Backward, inputs: Tensor, weight: Tensor, bias: Any
    ) -> Tensor:
        ctx.found, ctx.module, ctx.through = found, module, backward
        # no more than the layer's own node keeps: the rest may be changed in place before the backward pass
        keep = backward is _convolution
        ctx.save_for_backward(
            inputs if keep or weight.requires_grad else None, weight if keep or inputs.requires_grad else None
        )
        ctx.mark_dirty(values)  # not a view: an activation may work in place on it
        ctx.set_materialize_grads(False)
        return values

    @staticmethod
    def backward(ctx: Any, grads: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        if grads is None:
            return (None,) * 7
        inputs, weight = ctx.saved_tensors
        *_, for_inputs, for_weight, for_bias = ctx.needs_input_grad
        summed = ctx.found.take(grads)
        if torch.is_grad_enabled():  # a graph of the gradients is wanted
            summed = None
        wanted = (for_inputs, for_weight and summed is None, for_bias)
        to_inputs, to_weight, to_bias = ctx.through(ctx.module, grads, inputs, weight, wanted)
        return None, None, None, None, to_inputs, summed if for_weight and summed is not None else to_weight, to_bias


def _backward_of(module: Any) -> Backward | None:
    """How to go backwards through a layer that is what its class says, with its parameters as they are."""
    kind = type(module)
    backward = _BACKWARD.get(kind)
    if (kind.__module__, kind.__name__) == ("transformers.pytorch_utils", "Conv1D"):
        backward = _transposed_linear
    if backward is _convolution and (module.padding_mode != "zeros" or isinstance(module.padding, str)):
        return None
    is_replaced = {"forward", "_conv_forward", "weight", "bias"} & vars(module).keys()
    return None if is_replaced or module._parameters.keys() != {"weight", "bias"} else backward


def _is_observed(module: nn.Module) -> bool:
    """Whether anybody but the hook that asks may see or keep the layer's own node."""
    return bool(
        len(module._forward_hooks) > 1
        or module._backward_hooks
        or torch_modules._global_forward_hooks
        or torch_modules._global_backward_hooks
        or torch._C._autograd._top_saved_tensors_default_hooks(False)
        or forward_ad._current_level >= 0
        or torch.jit.is_tracing()
        or torch.compiler.is_compiling()
    )


def _convolution(module: Any, grads: Tensor, inputs: Tensor, weight: Tensor, wanted: tuple[bool, bool, bool]) -> Three:
    to_inputs = to_weight = None
    if wanted[0] or wanted[1]:
        to_inputs, to_weight, _ = torch.ops.aten.convolution_backward(
            grads, inputs, weight, None, module.stride, module.padding, module.dilation,
            False, [0] * len(module.stride), module.groups, (wanted[0], wanted[1], False),
        )  # fmt: skip
    # apart: asked for the bias alone the kernel computes the weight's gradient too
    return to_inputs, to_weight, grads.sum((0, *range(2, grads.ndim))) if wanted[2] else None


def _linear(module: Any, grads: Tensor, inputs: Any, weight: Any, wanted: tuple[bool, bool, bool]) -> Three:
    rows = grads.flatten(0, -2)
    return (
        grads @ weight if wanted[0] else None,
        rows.t() @ inputs.flatten(0, -2) if wanted[1] else None,
        rows.sum(0) if wanted[2] else None,
    )


def _transposed_linear(module: Any, grads: Tensor, inputs: Any, weight: Any, wanted: tuple[bool, bool, bool]) -> Three:
    to_inputs, to_weight, to_bias = _linear(module, grads, inputs, weight.t() if wanted[0] else None, wanted)
    return to_inputs, to_weight.t() if to_weight is not None else None, to_bias


_BACKWARD: dict[type[nn.Module], Backward] = {
    nn.Linear: _linear,
    nn.Conv1d: _convolution,
    nn.Conv2d: _convolution,
    nn.Conv3d: _convolution,
}
