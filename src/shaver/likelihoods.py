"""Likelihoods: the loss, and the curvature of the loss with respect to the network's outputs.

A likelihood turns outputs f and targets y into a negative log likelihood per sample, and provides a square root S
of its Hessian at the outputs, Λ = ∂²(−log p(y|f))/∂f² = S Sᵀ. A user's own likelihood subclasses
:class:`Likelihood` and implements those two functions.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shaver.naming import check_name

#: The exact GGN is refused if one square root of the output Hessian has more elements than this.
ROOT_LIMIT = 2**28
#: Labels are sampled from at most this many probabilities at a time; sampling needs twice their memory in addition.
PIECE = 2**24
#: Logits are divided by it before they are compared with a teacher's, so that the less likely classes count too.
TEMPERATURE = 2.0


class Likelihood(ABC):
    """The protocol: ``nll`` and ``root`` are required, ``mc_gradient`` has a correct default.

    Example:
        A Poisson likelihood with log rate f::

            class Poisson(shaver.likelihoods.Likelihood):
                def nll(self, outputs, targets):
                    return (outputs.exp() - targets * outputs + torch.lgamma(targets + 1)).flatten(1).sum(1)

                def root(self, outputs):
                    return torch.diag_embed((outputs / 2).exp()).movedim(-1, 0)   # columns first
    """

    @abstractmethod
    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Negative log likelihood per sample, shape ``(batch,)``, summed over any further dimensions."""

    @abstractmethod
    def root(self, outputs: Tensor) -> Tensor:
        """Columns s_k of a square root of the output Hessian, Λ = Σ_k s_k s_kᵀ, shape ``(columns, *outputs.shape)``."""

    def mc_gradient(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """A random output gradient g with mean zero and E[g gᵀ] = Λ, shaped like ``outputs``."""
        columns = self.root(outputs)
        shape = (*columns.shape[:2], *(1,) * (outputs.ndim - 1))
        signs = torch.randint(0, 2, shape, generator=generator).to(columns) * 2 - 1
        return (columns * signs).sum(0)

    def divergence(self, outputs: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
        """Per sample, how far the outputs are from a teacher's; for ``shaver.fit(…, teacher=…)``."""
        raise TypeError(f"{type(self).__name__} has no divergence(outputs, teacher, targets), which teacher= needs.")

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Raise ``ValueError`` if the outputs and targets do not fit together. Default: no check."""

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """A mask of the outputs that count, broadcastable to them; ignored tokens do not. Default None: all count."""
        return None

    def state(self) -> dict[str, float]:
        """Numbers that training changes, such as a noise variance; saved with checkpoints."""
        return {}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore what :meth:`state` returned."""


@dataclass
class Classification(Likelihood):
    """Softmax classification, p(y|f) = softmax(f)_y, with Λ = diag(p) − p pᵀ.

    Extra output dimensions (tokens, pixels) are several independent labels per sample: outputs
    ``(batch, tokens, classes)`` with targets ``(batch, tokens)``. ``class_dim`` sets another position of the classes.

    Attributes:
        class_dim: The output dimension with the classes; 1 for ``(batch, classes, height, width)``.
        ignore_index: Targets with this value are ignored, as in ``F.cross_entropy``.
    """

    class_dim: int = -1
    ignore_index: int = -100

    def _last(self, outputs: Tensor) -> Tensor:
        return outputs.movedim(self.class_dim, -1)

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check that there are at least two classes, shapes match, and each label is a class or the ignored index."""
        self.check_classes(outputs)
        expected = self._last(outputs).shape[:-1]
        if targets.shape != expected:
            raise ValueError(
                f"classification outputs of shape {tuple(outputs.shape)} with classes in dimension "
                f"{self.class_dim} need targets of shape {tuple(expected)}, "
                f"but targets have shape {tuple(targets.shape)}. Class probabilities as targets are not "
                "supported; Classification(class_dim=1) reads (batch, classes, …) outputs. For numbers as targets "
                'pass likelihood="regression".'
            )
        if targets.dtype not in _INTEGERS:
            raise ValueError(
                f"classification targets are class indices (integers), not {targets.dtype}. For numbers as targets "
                'pass likelihood="regression".'
            )
        classes = outputs.shape[self.class_dim]
        wrong = (targets != self.ignore_index) & ((targets < 0) | (targets >= classes))
        if bool(wrong.any()):
            raise ValueError(
                f"label {int(targets[wrong][0])} is out of range: the network has {classes} outputs, so "
                f"labels run from 0 to {classes - 1} (or {self.ignore_index}, ignored)."
            )

    def check_classes(self, outputs: Tensor) -> None:
        """Refuse outputs with a single class: their softmax is always 1."""
        if outputs.ndim < 2 or outputs.shape[self.class_dim] < 2:
            raise ValueError(
                f"classification needs one output per class and at least two classes, but the outputs have shape "
                f"{tuple(outputs.shape)}. For a yes/no network with one logit f, end in nn.Linear(…, 2) and use "
                "F.cross_entropy, or return torch.cat([zeros_like(f), f], 1). For real-valued targets pass "
                'likelihood="regression".'
            )

    def counted(self, outputs: Tensor, targets: Tensor) -> Tensor | None:
        """False where the target is the ignored index."""
        ignored = targets == self.ignore_index
        return ~ignored.unsqueeze(-1).movedim(-1, self.class_dim) if bool(ignored.any()) else None

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Cross entropy per sample, summed over its tokens."""
        last = self._last(outputs)
        logits, labels = _at_least_float32(last.reshape(-1, last.shape[-1])), targets.reshape(-1).long()
        each = F.cross_entropy(logits, labels, ignore_index=self.ignore_index, reduction="none")
        return each.reshape(len(outputs), -1).sum(1)

    def divergence(self, outputs: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
        """T² KL(p*‖p), p = softmax(f/T) with T = :data:`TEMPERATURE` and p* the teacher's (Hinton et al., 2015)."""
        logits = (self._last(_at_least_float32(f)) / TEMPERATURE for f in (outputs, teacher))
        own, aim = (each.log_softmax(-1) for each in logits)
        each = TEMPERATURE**2 * F.kl_div(own, aim, log_target=True, reduction="none").sum(-1)
        return (each * (targets != self.ignore_index)).reshape(len(outputs), -1).sum(1)

    def root(self, outputs: Tensor) -> Tensor:
        """The Cholesky factor of diag(p) − p pᵀ in closed form: C − 1 columns per label, the rank of the Hessian.

        With q_k = Σ_{j>k} p_j: L_kk = √(p_k q_k / q_{k−1}) and L_jk = −p_j √(p_k / (q_{k−1} q_k)) for j > k
        (Tanabe and Sagae, 1992).
        """
        last = self._last(outputs.detach())
        classes = last.shape[-1]
        labels = last[0, ..., 0].numel()
        if labels * (classes - 1) * outputs.numel() > ROOT_LIMIT:
            raise ValueError(
                f"the exact GGN for outputs of shape {tuple(outputs.shape)} needs {labels * (classes - 1)} "
                'backward passes per batch; use source="mc" (unbiased, one pass), source="ef", or smaller batches.'
            )
        p = last.softmax(-1)
        tail = p.flip(-1).cumsum(-1).flip(-1)  # tail_k = Σ_{j≥k} p_j = q_{k−1}
        q = torch.cat([tail[..., 1:], torch.zeros_like(p[..., :1])], -1)
        tiny = torch.finfo(p.dtype).tiny
        below = torch.tril(p.new_ones(classes, classes - 1), -1)
        ratio = (p / (tail * q).clamp_min(tiny)).sqrt()[..., :-1]  # √(p_k / (q_{k−1} q_k))
        factor = -p.unsqueeze(-1) * ratio.unsqueeze(-2) * below
        diagonal = (p * q / tail.clamp_min(tiny)).sqrt()[..., :-1]
        factor.diagonal(dim1=-2, dim2=-1).copy_(diagonal)
        if labels == 1:  # (batch, …ones…, C, C−1) → (C−1, batch, …, C)
            columns = factor.movedim(-1, 0)
        else:  # one column per label and class, zero except at its own label
            eye = torch.eye(labels, dtype=p.dtype, device=p.device)
            flat = factor.reshape(len(outputs), labels, classes, classes - 1)
            columns = torch.einsum("blck,lm->mkblc", flat, eye).reshape(labels * (classes - 1), *last.shape)
        return columns.movedim(-1, self.class_dim if self.class_dim < 0 else self.class_dim + 1)

    def mc_gradient(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """p − e_ŷ, with a label ŷ sampled from the model at each position."""
        last = self._last(outputs.detach())
        gradient = last.softmax(-1).contiguous()
        flat = gradient.view(-1, gradient.shape[-1])
        for piece in torch.split(flat, max(1, PIECE // flat.shape[1])):
            p = piece.float().cpu() if generator is not None else piece.float()
            label = torch.multinomial(p, 1, generator=generator).to(piece.device)
            piece.scatter_add_(1, label, piece.new_full(label.shape, -1.0))
        return gradient.movedim(-1, self.class_dim)


@dataclass
class Regression(Likelihood):
    """Gaussian regression, p(y|f) = N(y; f, σ²), with Λ = I/σ².

    Attributes:
        noise: The noise variance σ². :func:`shaver.evidence.improve_noise` learns it from the evidence.
    """

    noise: float = 1.0

    def __post_init__(self) -> None:
        if not (self.noise > 0 and math.isfinite(self.noise)):
            raise ValueError(f"the noise variance must be positive and finite, not {self.noise!r}.")

    def check(self, outputs: Tensor, targets: Tensor) -> None:
        """Check that outputs and targets have the same shape."""
        if outputs.shape != targets.shape:
            raise ValueError(
                f"regression needs targets shaped like the outputs, {tuple(outputs.shape)}, but they have "
                f"shape {tuple(targets.shape)}; y.unsqueeze(1) or outputs.squeeze(1) usually fixes this."
            )
        if targets.dtype == torch.bool or targets.is_complex():
            raise ValueError(f"regression targets are real numbers, not {targets.dtype}; use y.float().")

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """½ Σ (f − y)²/σ² + ½ D log(2πσ²) per sample with D outputs."""
        squares = (outputs - targets).square().flatten(1)
        return 0.5 * squares.sum(1) / self.noise + 0.5 * squares.shape[1] * math.log(2 * math.pi * self.noise)

    def divergence(self, outputs: Tensor, teacher: Tensor, targets: Tensor) -> Tensor:
        """½ Σ (f − f*)²/σ², f* the teacher's outputs."""
        return 0.5 * (outputs - teacher).square().flatten(1).sum(1) / self.noise

    def root(self, outputs: Tensor) -> Tensor:
        """Unit vectors divided by σ, one per output of a sample."""
        per_sample = outputs[0].numel()
        if per_sample * outputs.numel() > ROOT_LIMIT:
            raise ValueError(f'{per_sample} outputs per sample are too many for the exact GGN; use source="mc".')
        eye = torch.eye(per_sample, dtype=outputs.dtype, device=outputs.device) / math.sqrt(self.noise)
        return eye.reshape(per_sample, 1, *outputs.shape[1:]).expand(per_sample, *outputs.shape)

    def mc_gradient(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """ε/σ with standard normal ε."""
        noise = torch.randn(outputs.shape, generator=generator, dtype=torch.float32).to(outputs)
        return noise / math.sqrt(self.noise)

    def state(self) -> dict[str, float]:
        """The noise variance."""
        return {"noise": self.noise}

    def load_state(self, state: dict[str, float]) -> None:
        """Restore the noise variance."""
        self.noise = state["noise"]


def _at_least_float32(logits: Tensor) -> Tensor:
    return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)
_NAMED: dict[str, type[Likelihood]] = {"classification": Classification, "regression": Regression}


def get_likelihood(likelihood: "str | Likelihood") -> Likelihood:
    """A likelihood by name (``"classification"``, ``"regression"``), or the object itself.

    Raises:
        ValueError: The name is not one of them, with the nearest match.
        TypeError: The object does not subclass :class:`Likelihood`.
    """
    if isinstance(likelihood, Likelihood):
        return likelihood
    if isinstance(likelihood, str):
        return _NAMED[check_name("likelihood", likelihood, _NAMED)]()
    raise TypeError(
        f"likelihood must be {' or '.join(map(repr, _NAMED))} or a subclass of shaver.likelihoods.Likelihood, "
        f"not {likelihood!r}."
    )
