"""Reading a loss off its gradient: how often a classification loss counts each sample, and the likelihood itself."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from shaver.likelihoods import Classification

#: Probabilities held at once: those of a large vocabulary at many positions would outweigh the network.
PIECE = 2**24
_SUM = torch.float64


@dataclass(frozen=True)
class Reading:
    """What the gradient at the outputs tells.

    Attributes:
        factor: c in loss = c · Σ_n −log p(y_n): 1/B for a mean over B samples, 1 for a sum, times the loss scale.
        nll: Σ_n −log p(y_n).
    """

    factor: float
    nll: float


def read_loss(likelihood: Classification, outputs: Tensor, gradient: Tensor) -> Reading | None:
    """Find c and the labels from ∂loss/∂f = c · (softmax(f) − e_y), the gradient of cross entropy.

    Each row has one negative entry, at its label; ignored rows are zero. No assumption is made about how the loss
    was reduced, accumulated or scaled.

    Returns:
        The reading, or None where every row is zero, because its label is ignored or predicted with certainty.

    Raises:
        ValueError: The gradient is not of that form, so the loss is not the plain cross entropy of the outputs.
    """
    f = outputs.movedim(likelihood.class_dim, -1).flatten(0, -2)
    g = (
        gradient.movedim(likelihood.class_dim, -1)
        .flatten(0, -2)
        .to(f.dtype if f.element_size() >= 4 else torch.float32)
    )
    f = f.to(g.dtype)
    low, high = g.amin(1), g.amax(1)  # both carry a NaN along, and neither needs a copy of a large gradient
    if not bool(torch.isfinite(low + high).all()):
        raise FloatingPointError("the loss's gradient at the outputs holds NaN or infinity.")
    counted = torch.maximum(-low, high) > 100 * torch.finfo(g.dtype).tiny  # below, a number has no digits left to read
    if not bool(counted.any()):
        return None
    step = max(1, PIECE // f.shape[1])
    pieces = list(zip(*(torch.split(rows, step) for rows in (f, g, counted)), strict=True))
    parts = [_Part.of(*pieces[0])] if len(pieces) == 1 else None  # a large vocabulary is computed twice, not kept

    def each() -> Iterator[_Part]:
        return iter(parts) if parts is not None else (_Part.of(*piece) for piece in pieces)

    sums = torch.stack([torch.stack([part.others.sum(dtype=_SUM), part.other_p.sum(dtype=_SUM)]) for part in each()])
    factor = float(torch.div(*sums.sum(0)))
    missed, size, nll = torch.zeros(3, dtype=_SUM, device=f.device)
    for part in each():
        missed += (part.others - factor * part.other_p).abs().sum(dtype=_SUM)
        missed += (part.label_gradient - factor * (part.log_p.exp() - 1)).abs().sum(dtype=_SUM)
        size += part.others.abs().sum(dtype=_SUM) + part.label_gradient.abs().sum(dtype=_SUM)
        nll -= part.log_p.sum(dtype=_SUM)
    is_exact = outputs.element_size() >= 4 and gradient.element_size() >= 4
    rounding = 4 * torch.finfo(gradient.dtype if is_exact else torch.bfloat16).eps * int(counted.sum()) * factor
    allowed = (0.02 if is_exact else 0.1) * float(size) + rounding
    if not (factor > 0 and float(missed) <= allowed):  # NaN is neither: a single output has no other class
        raise ValueError(
            "the loss is not a multiple of the cross entropy of the model's outputs (label smoothing, class or "
            "sample weights, a further term, or outputs that are already probabilities), so its scale cannot be "
            'read. Pass loss="mean" or loss="sum", whichever reduction it uses, and source="mc".'
        )
    return Reading(factor, float(nll))


@dataclass(frozen=True)
class _Part:
    """Some rows: gradients and probabilities of the classes that are not the label, and of the label."""

    others: Tensor
    other_p: Tensor
    label_gradient: Tensor
    log_p: Tensor

    @classmethod
    def of(cls, f: Tensor, g: Tensor, counted: Tensor) -> "_Part":
        """From outputs and gradients of the rows that count."""
        if not bool(counted.all()):
            f, g = f[counted], g[counted]
        log_p = f.log_softmax(1)
        p = log_p.exp()
        # where 1 − p of the label is rounded to 0, other classes may have a gradient of 0 too: the likeliest is it
        label = p.masked_fill(g > g.amin(1, keepdim=True), -1.0).argmax(1, keepdim=True)
        # c from the other classes, c · p_j: at the label, p_y − 1 has lost its digits once the network is confident
        return cls(g.scatter(1, label, 0.0), p.scatter_(1, label, 0.0), g.gather(1, label), log_p.gather(1, label))
