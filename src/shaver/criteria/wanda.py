"""Wanda: |W| · ‖x‖₂, a weight times the norm of the input it multiplies (Sun et al., 2024)."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from shaver.criteria.prunable_weights import is_transposed_linear
from shaver.criteria.registry import Given, criterion
from shaver.measure.evaluating import unfused_attention

_CONV = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)

#: Adds ‖x‖² to the entry of a parameter; shaped to broadcast against it.
_Add = Callable[[Tensor, Tensor], None]


@criterion("wanda", needs=["batches"])
def wanda(given: Given) -> dict[str, Tensor]:
    """|W| · ‖x‖₂ with the norm over all samples and positions of all batches.

    The norm ‖x‖₂ per layer type:

    - Linear layers and the transformers library's ``Conv1D``: of the input feature.
    - Convolutions: of the inputs that the weight multiplies, so per input channel *and* kernel position, with padding.
    - Transposed convolutions: of the input channel.
    - ``nn.MultiheadAttention``: of the query, key or value feature; for the output matrix, of the attention's output.

    A global ranking compares the scores of different layers directly. The authors of Wanda compare only within each
    output; ``scope="layer"`` is closest to that.
    """
    squares: dict[int, Tensor] = {}

    def add(parameter: Tensor, norm: Tensor) -> None:
        old = squares.get(id(parameter))
        squares[id(parameter)] = norm.double() if old is None else old + norm

    with torch.no_grad(), _listening(given.model, add):
        for batch in given.batches():
            given.forward(given.model, batch)
    scores = {}
    for name, weight in given.weights.items():
        if id(weight) not in squares:
            raise ValueError(
                f"wanda has no input norm for {name!r}: it covers linear, convolution and attention layers that the "
                "forward pass uses. Pass rule=lambda name, parameter: … to leave this weight out."
            )
        scores[name] = (weight.detach().abs() * squares[id(weight)].sqrt()).to(weight.dtype)
    return scores


@contextmanager
def _listening(model: nn.Module, add: _Add) -> Iterator[None]:
    """Hooks on every supported layer. Attention's fused kernel is off, so that the hooks of its layers run."""
    handles = []
    for module in model.modules():
        if isinstance(module, nn.MultiheadAttention):
            handles.append(module.register_forward_hook(_attention(add), with_kwargs=True))
        elif isinstance(module, nn.Linear | nn.modules.conv._ConvNd) or is_transposed_linear(module):
            handles.append(module.register_forward_hook(partial(_layer, add)))
    try:
        with unfused_attention():
            yield
    finally:
        for handle in handles:
            handle.remove()


def _layer(add: _Add, module: nn.Module, inputs: tuple[Any, ...], _output: Any) -> None:
    """A hook for a layer with one weight matrix or kernel."""
    weight, x = getattr(module, "weight_orig", module.weight), inputs[0].double()  # under torch's own pruning
    assert isinstance(weight, Tensor)
    if isinstance(module, _CONV):
        add(weight, _kernel_norms(module, x.square()))
    elif isinstance(module, _TRANSPOSED):
        channels = x.square().transpose(0, -1 - (weight.ndim - 2))  # the channel, batched or not
        add(weight, channels.flatten(1).sum(1).reshape(-1, *(1,) * (weight.ndim - 1)))
    else:
        features = x.square().reshape(-1, x.shape[-1]).sum(0)
        add(weight, features.unsqueeze(1) if is_transposed_linear(module) else features)


def _kernel_norms(conv: nn.Conv1d | nn.Conv2d | nn.Conv3d, squares: Tensor) -> Tensor:
    """Σ x² over all positions for each input channel and kernel position, without unfolding the input.

    The derivative of Σ conv(x², w) by w is exactly that sum, with stride, padding and dilation as the layer has them.
    """
    with torch.enable_grad():
        one = conv.weight.new_zeros((conv.groups, *conv.weight.shape[1:]), dtype=torch.float64, requires_grad=True)
        (norms,) = torch.autograd.grad(conv._conv_forward(squares, one, None).sum(), one)
    return norms.repeat_interleave(conv.out_channels // conv.groups, 0)


def _attention(add: _Add) -> Callable[[nn.Module, tuple[Any, ...], Mapping[str, Any], Any], None]:
    """A hook for packed or separate input matrices and the output matrix, which attention uses without calling it."""
    inside = False

    def hook(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], _output: Any) -> None:
        nonlocal inside
        assert isinstance(module, nn.MultiheadAttention)
        if inside:
            return
        triple = [
            kwargs.get(key, args[i] if i < len(args) else None) for i, key in enumerate(("query", "key", "value"))
        ]
        norms = [x.double().square().reshape(-1, x.shape[-1]).sum(0) for x in triple]
        if module.in_proj_weight is not None:
            rows = [norm.expand(module.embed_dim, -1) for norm in norms]
            add(module.in_proj_weight, torch.cat(rows))
        else:
            add(module.q_proj_weight, norms[0])
            add(module.k_proj_weight, norms[1])
            add(module.v_proj_weight, norms[2])
        # With the identity for its output matrix, attention returns what that matrix would have multiplied.
        plain = {"out_proj.weight": torch.eye(module.embed_dim).to(module.out_proj.weight)}
        if module.out_proj.bias is not None:
            plain["out_proj.bias"] = torch.zeros_like(module.out_proj.bias)
        inside = True
        try:
            mixed = functional_call(module, plain, args, dict(kwargs))[0]
        finally:
            inside = False
        add(module.out_proj.weight, mixed.double().square().reshape(-1, mixed.shape[-1]).sum(0))

    return hook
