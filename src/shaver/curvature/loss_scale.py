"""Reading the scale of a classification loss, and the likelihood, from the gradient at the outputs."""

import math

import torch
from torch import Tensor

from shaver.likelihoods import Classification

#: Probabilities in memory at a time: a large vocabulary at many positions would need more than the network.
PIECE = 2**22


def read_loss(likelihood: Classification, outputs: Tensor, gradient: Tensor) -> tuple[float, float] | None:
    """Find c and the labels from ∂loss/∂f = c · (softmax(f) − e_y), the gradient of cross entropy.

    Each row has one negative entry, at its label; ignored rows are zero. The loss may be reduced, accumulated or scaled
    in any way.

    Returns:
        c, which is 1/B for a mean over B samples and 1 for a sum, times the loss scale; and Σ_n −log p(y_n). None if
        every row is zero because its label is ignored or predicted with certainty.
    """
    f = outputs.movedim(likelihood.class_dim, -1).flatten(0, -2)
    g = gradient.movedim(likelihood.class_dim, -1).flatten(0, -2)
    g = g.to(f.dtype if f.element_size() >= 4 else torch.float32)
    f = f.to(g.dtype)
    peak = torch.maximum(-g.amin(1), g.amax(1))  # NaN if there is any, without a copy of a large gradient
    counted = peak > 100 * torch.finfo(g.dtype).tiny  # smaller numbers have too few digits
    rows = len(f)
    if not bool(counted.all()):
        _check_finite(bool(peak.isfinite().all()))
        f, g = f[counted], g[counted]
        rows = len(f)
    if not rows:
        return None
    step = max(1, PIECE // f.shape[1])
    pieces = zip(torch.split(f, step), torch.split(g, step), strict=True)
    of_others, p_of_others, nll, *squares = torch.stack([_sums(*piece) for piece in pieces]).sum(0).tolist()
    _check_finite(all(map(math.isfinite, squares)))
    factor = of_others / p_of_others if p_of_others else math.nan
    is_exact = outputs.element_size() >= 4 and gradient.element_size() >= 4
    rounding = 4 * torch.finfo(gradient.dtype if is_exact else torch.bfloat16).eps * math.sqrt(rows) * factor
    fits = factor > 0  # False if it is NaN, for a single output
    # checked at the labels, where 1 is subtracted, and at the other classes, which are much smaller and more exact
    for (gg, gq, qq), lost in ((squares[:3], rounding), (squares[3:], 0.0)):
        missed = math.sqrt(max(gg - 2 * factor * gq + factor**2 * qq, 0.0))
        fits = fits and missed <= (0.02 if is_exact else 0.1) * math.sqrt(gg) + lost
    if not fits:
        raise ValueError(
            "the loss is not a multiple of the cross entropy of the model's outputs (label smoothing, class or "
            "sample weights, a further term, or outputs that are already probabilities), so its scale cannot be "
            'read. Pass loss="mean" or loss="sum", whichever reduction it uses, and source="mc".'
        )
    return factor, nll


def _sums(f: Tensor, g: Tensor) -> Tensor:
    """For rows that count: Σ g and Σ p over classes that are not the label, −Σ log p_y, and six sums of squares.

    These are Σ g², Σ g·q, Σ q² at the labels and at the other classes. q is the expected g in units of c: p, and at the
    label −Σ p of the other classes. Computing p_y − 1 instead would lose its digits once the network is confident. For
    the same reason c is computed from the other classes.
    """
    log_p = f.log_softmax(1)
    q = log_p.exp()
    # if 1 − p of the label rounds to 0, other classes may have a gradient of 0 too: the label is the most likely one
    label = q.masked_fill(g > g.amin(1, keepdim=True), -1.0).argmax(1, keepdim=True)
    others = q.scatter_(1, label, 0.0).sum(1, keepdim=True)
    rest = torch.stack([g.scatter(1, label, 0.0), q]).flatten(1).double()
    at_label = torch.stack([g.gather(1, label), -others]).flatten(1).double()
    sums = [*rest.sum(1), -log_p.gather(1, label).sum(dtype=torch.float64)]
    for pair in (at_label, rest):
        gram = pair @ pair.t()
        sums += [gram[0, 0], gram[0, 1], gram[1, 1]]
    return torch.stack(sums)


def _check_finite(is_finite: bool) -> None:
    if not is_finite:
        raise FloatingPointError("the loss's gradient at the outputs holds NaN or infinity.")
