"""One rule per layer type: from a layer's inputs and output gradients to per-sample gradients in factored form.

A rule is a function ``rule(module, inputs, grads)`` that returns ``{parameter name: use}``. ``inputs`` has the shape
``(B, …, *own)``: the samples, optional further dimensions, and the layer's own dimensions. ``grads`` has K output
gradients in front: ``(K, B, …, *own)``. :mod:`shaver.curvature.rule_choice` compares the per-sample gradients of every
rule with autograd's before using it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize

from shaver.curvature.kernels import convolution_kernel, kernel_shape, patches
from shaver.curvature.uses import Dense, Outer, Rows, Shift, Use

Rule = Callable[[Any, Tensor, Tensor], dict[str, Use]]

_RULES: dict[type[nn.Module], tuple[str, Rule]] = {}


def register_rule(*types: type[nn.Module], name: str | None = None) -> Callable[[Rule], Rule]:
    """Add a fast rule for your own module type; :func:`shaver.testing.check_rule` checks it.

    Example:
        A layer with one gain per feature, y = x * gain::

            @shaver.curvature.register_rule(Gain)
            def gain(module, inputs, grads):
                return {"gain": Dense((grads * inputs).flatten(2, -2).sum(2))}   # (K, B, features)

    The rule is compared with autograd on the first batch. If they differ, the generic rule is used, and ``coverage()``
    says so.
    """

    def decorate(rule: Rule) -> Rule:
        for kind in types:
            _RULES[kind] = (name or rule.__name__.replace("_", " "), rule)
        return rule

    return decorate


@dataclass(frozen=True)
class Candidate:
    """A rule that may fit a module."""

    label: str  # the rule's name
    rule: Rule
    # Whether the rule was chosen by the module's name or parameters, not by its type. Such a rule must also hold
    # on random inputs: a few samples may not show everything that the module does.
    is_guess: bool = False


def candidates_for(module: nn.Module) -> Iterator[Candidate]:
    """The rules that may fit a module, best first.

    There is none for a subclass with its own ``forward``. A parametrized module gets only the rules of this file. They
    never read its weight: that would run the parametrization again and draw random numbers (DropConnect) or change
    buffers (spectral norm).
    """
    for kind in type(module).__mro__:
        if kind in _RULES:
            label, rule = _RULES[kind]
            reads_no_weight = rule.__module__ == __name__ or not parametrize.is_parametrized(module)
            if type(module).forward is kind.forward and reads_no_weight:
                yield Candidate(label, rule)
            return
    class_name = type(module).__name__
    own = dict(module.named_parameters(recurse=False))
    if class_name == "Conv1D" and "weight" in own and own["weight"].ndim == 2:
        yield Candidate("linear (transposed)", transposed_linear, is_guess=True)
    elif class_name.endswith("RMSNorm") and set(own) == {"weight"}:
        yield Candidate("rms norm", rms_norm_like, is_guess=True)
    elif len(own) == 1 and not list(module.children()) and next(iter(own.values())).numel() == 1:
        yield Candidate("scalar bias", scalar_bias, is_guess=True)
        yield Candidate("scalar scale", scalar_scale, is_guess=True)


# Weight matrices ------------------------------------------------------------------------------------------------


def _positions_last(values: Tensor, lead: int) -> Tensor:
    """``(lead dims, …, D)`` → ``(lead dims, D, T)``."""
    return values.flatten(lead, -2).transpose(-1, -2) if values.ndim > lead + 1 else values.unsqueeze(-1)


@register_rule(nn.Linear)
def linear(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """y = W x + b at every position."""
    a, b = _positions_last(inputs, 1), _positions_last(grads, 2)
    shape = torch.Size((b.shape[2], a.shape[1]))
    return {"weight": Outer(lambda piece: a[piece], b, shape), "bias": Shift(b)}


def transposed_linear(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """y = x W + b, with the weight stored (in, out)."""
    a, b = _positions_last(inputs, 1), _positions_last(grads, 2)
    shape = torch.Size((a.shape[1], b.shape[2]))
    return {"weight": Outer(lambda piece: a[piece], b, shape, transposed=True), "bias": Shift(b)}


@register_rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """A convolution is a linear layer on patches, one position per output pixel."""
    spatial = len(module.kernel_size)

    def unfolded(piece: slice) -> Tensor:
        chosen = inputs[piece]
        patch = patches(module, chosen.flatten(0, -(spatial + 2)))  # (n·extra, C·kernel, L)
        if len(patch) == len(chosen):
            return patch
        return patch.reshape(len(chosen), -1, *patch.shape[1:]).transpose(1, 2).flatten(2)

    own = grads.flatten(-spatial)  # (K, B, …, O, L)
    b = own if own.ndim == 4 else own.flatten(2, -3).transpose(2, 3).flatten(3)
    kernel = convolution_kernel(module, inputs, grads) if spatial == 2 and own.ndim == 4 else None
    return {
        "weight": Outer(unfolded, b, kernel_shape(module), module.groups, kernel=kernel),
        "bias": Shift(b, module.groups),
    }


@register_rule(nn.Embedding)
def embedding(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """Row look-up."""
    index, rows = inputs.flatten(1), grads.flatten(2, -2) if grads.ndim > 3 else grads.unsqueeze(2)
    if inputs.ndim == 1:
        index = inputs.unsqueeze(1)
    return {"weight": Rows(index, rows, torch.Size((module.num_embeddings, module.embedding_dim)), module.padding_idx)}


# Norms ----------------------------------------------------------------------------------------------------------


def _affine(normalised: Tensor, grads: Tensor, keep: int) -> dict[str, Use]:
    """y = w ∘ x̂ + b over ``keep`` trailing dimensions, summed over all dimensions between the samples and these."""
    between = tuple(range(2, grads.ndim - keep))

    def total(values: Tensor) -> Tensor:
        return values.sum(between) if between else values

    return {"weight": Dense(total(grads * normalised)), "bias": Dense(total(grads))}


@register_rule(nn.LayerNorm)
def layer_norm(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """Affine part of layer norm."""
    shape = module.normalized_shape
    return _affine(F.layer_norm(inputs, shape, None, None, module.eps), grads, len(shape))


@register_rule(nn.RMSNorm)
def rms_norm(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """Scale of root-mean-square norm."""
    shape = module.normalized_shape
    return _affine(F.rms_norm(inputs, shape, None, module.eps), grads, len(shape))


def rms_norm_like(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """Root-mean-square norm of another library, with its ``variance_epsilon`` or ``eps``."""
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", 1e-6))
    return _affine(F.rms_norm(inputs, inputs.shape[-1:], None, eps), grads, 1)


def _channels(normalised: Tensor, grads: Tensor, own: int) -> dict[str, Use]:
    """y = w_c x̂ + b_c for ``(…, C, *spatial)`` with ``own`` dimensions from C on."""

    def total(values: Tensor) -> Tensor:  # (K, B, …, C, *spatial) → (K, B, C)
        values = values.flatten(-own + 1).sum(-1) if own > 1 else values
        return values.flatten(2, -2).sum(2) if values.ndim > 3 else values

    return {"weight": Dense(total(grads * normalised)), "bias": Dense(total(grads))}


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
    return _channels(normalised.view_as(inputs), grads, own)


@register_rule(nn.GroupNorm)
def group_norm(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """Affine part of group norm."""
    normalised = F.group_norm(inputs, module.num_groups, None, None, module.eps)
    return _channels(normalised, grads, inputs.ndim - 1)


@register_rule(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d)
def instance_norm(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """Affine part of instance norm."""
    batch_statistics = module.training or not module.track_running_stats
    mean, variance = (None, None) if batch_statistics else (module.running_mean, module.running_var)
    normalised = F.instance_norm(inputs, mean, variance, None, None, batch_statistics, 0.0, module.eps)
    return _channels(normalised, grads, inputs.ndim - 1)


@register_rule(nn.PReLU)
def prelu(module: Any, inputs: Tensor, grads: Tensor) -> dict[str, Use]:
    """y = x for x > 0, else w x, with one slope w for all channels or one per channel."""
    through = grads * inputs.clamp_max(0)
    if module.num_parameters == 1:
        return {"weight": Dense(through.flatten(2).sum(2, keepdim=True))}
    return {"weight": Dense(through.flatten(3).sum(3) if through.ndim > 3 else through)}


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
