"""Floating-point operations (FLOPs) per sample: all of them, and those with non-zero weights.

A multiply-add counts as two FLOPs. Matrix products (linear layers, einsum, recurrent layers on the CPU), convolutions
(grouped, dilated, transposed) and attention are counted; padding and masked positions count in full. Biases,
activations, normalisation, pooling, softmax and lookups are not counted.

The operations that PyTorch executes are counted, so any model works without a rule per layer, also on the CPU, where
attention is one fused operation.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from shaver.batches import tensors_in
from shaver.measure.evaluating import evaluating, unfused_attention
from shaver.measure.example import Example, call, resize

aten = torch.ops.aten


@dataclass(frozen=True)
class Flops:
    """FLOPs per sample.

    Attributes:
        dense: All FLOPs.
        sparse: Those with a non-zero weight; products of two activations, as in attention, count in full.
    """

    dense: int
    sparse: int


def flops(model: nn.Module, example: Example) -> Flops:
    """Count the FLOPs per sample, 2 per multiply-add. The module's docstring lists what is counted.

    Example:
        >>> flops(nn.Linear(30, 100), torch.zeros(1, 30))
        Flops(dense=6000, sparse=6000)

    Args:
        model: The network; it is called once in evaluation mode.
        example: Inputs of at least one sample: a tensor, a tuple of positional or a dict of keyword arguments. The
            first sample is used.
    """
    one = resize(example, 1)
    counter = _Counter([*model.parameters(), *model.buffers()])
    with evaluating(model), unfused_attention(), counter:  # a fused kernel would hide the products inside it
        call(model, one)
    return Flops(counter.dense, counter.sparse)


class _Counter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Adds up the FLOPs of every operation, and tracks which tensors are computed from weights only.

    An operation often receives not the parameter itself but its transpose, a slice, or its product with a mask. A
    tensor computed only from weights counts as a weight.
    """

    def __init__(self, weights: Iterable[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.dense = 0
        self.sparse = 0
        # The tensors themselves are kept: the address of a freed storage could be reused by an activation.
        self.weights = {_key(weight): weight for weight in weights}

    def __torch_dispatch__(
        self, operation: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = operation(*args, **(kwargs or {}))
        rule = _RULES.get(operation.overloadpacket)
        if rule is not None:
            dense, sparse = rule(self.is_weight, result, *args)
            self.dense += 2 * dense
            self.sparse += 2 * sparse
        inputs = tensors_in((args, kwargs or {}))
        outputs = {_key(tensor): tensor for tensor in tensors_in(result)}
        if inputs and all(map(self.is_weight, inputs)):
            self.weights |= outputs
        elif inputs:  # activations written into a weight's storage, as in a cache, make it an activation
            for key in outputs:
                self.weights.pop(key, None)
        return result

    def is_weight(self, tensor: Tensor) -> bool:
        return _key(tensor) in self.weights


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


_IsWeight = Callable[[Tensor], bool]
_Count = tuple[int, int]  # multiply-adds: all, and those with non-zero weights


def _product(is_weight: _IsWeight, a: Tensor, b: Tensor) -> _Count:
    """(…, n, k) @ (…, k, m) or (n, k) @ (k): each inner index multiplies n entries of a by m entries of b."""
    b = b if b.ndim > 1 else b.unsqueeze(-1)
    dense = math.prod(a.shape) * b.shape[-1]
    if not is_weight(a) and not is_weight(b):
        return dense, dense
    left = (a != 0).sum(-2) if is_weight(a) else torch.tensor(a.shape[-2])
    right = (b != 0).sum(-1) if is_weight(b) else torch.tensor(b.shape[-1])
    pairs = (left * right).expand(*a.shape[:-2], a.shape[-1])
    return dense, int(pairs.sum())


def _mm(is_weight: _IsWeight, _: object, a: Tensor, b: Tensor, *rest: object) -> _Count:
    return _product(is_weight, a, b)


def _addmm(is_weight: _IsWeight, _: object, bias: Tensor, a: Tensor, b: Tensor, *rest: object) -> _Count:
    return _product(is_weight, a, b)


def _convolution(
    is_weight: _IsWeight,
    result: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    transposed: bool,
    *rest: object,
) -> _Count:
    """Each weight is used once per output position, or per input position of a transposed convolution."""
    spatial = weight.ndim - 2
    over = x if transposed else result
    uses = over.shape[0] * math.prod(over.shape[-spatial:])
    nonzeros = int(weight.count_nonzero()) if is_weight(weight) else weight.numel()
    return uses * weight.numel(), uses * nonzeros


def _attention(is_weight: _IsWeight, _: object, query: Tensor, key: Tensor, value: Tensor, *rest: object) -> _Count:
    """Scores of width ``query.shape[-1]`` and a mean of values, per head of the query, also if heads share keys."""
    dense = math.prod(query.shape[:-1]) * key.shape[-2] * (query.shape[-1] + value.shape[-1])
    return dense, dense


def _recurrent(
    is_weight: _IsWeight, _: object, x: Tensor, weight_input: Tensor, weight_hidden: Tensor, *rest: object
) -> _Count:
    """One direction of one layer over ``(steps, batch, features)``: each weight is used at every step."""
    uses = x.shape[0] * x.shape[1]
    weights = (weight_input, weight_hidden)
    dense, nonzeros = sum(w.numel() for w in weights), sum(int(w.count_nonzero()) for w in weights)
    return uses * dense, uses * nonzeros


_RULES: dict[Any, Callable[..., _Count]] = {
    aten.mm: _mm,
    aten.bmm: _mm,
    aten.mv: _mm,
    aten.dot: lambda is_weight, _, a, b: _product(is_weight, a.unsqueeze(0), b),
    aten.addmm: _addmm,
    aten.addmv: _addmm,
    aten.baddbmm: _addmm,
    aten.addbmm: _addmm,
    aten.convolution: _convolution,
    aten.mkldnn_rnn_layer: _recurrent,
    aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    aten._scaled_dot_product_flash_attention: _attention,
    aten._scaled_dot_product_efficient_attention: _attention,
    aten._scaled_dot_product_cudnn_attention: _attention,
    aten._scaled_dot_product_fused_attention_overrideable: _attention,
}
