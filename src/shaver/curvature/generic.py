"""The generic rule: per-sample gradients of any parameter by ``torch.func``, a few samples at a time."""

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from shaver.curvature.blocks import at_least_float32
from shaver.curvature.capture import Functional, Samples
from shaver.curvature.plan import Plan


class GenericRule:
    """Per-sample gradients of any parameter of any model: exact, but slower than a rule for a layer."""

    def __init__(self, function: Functional, budget: int, plan: Plan) -> None:
        self.function, self.budget, self.plan = function, budget, plan

    def square_sum(self, weights: Mapping[str, Tensor], batch: Any, cotangents: Tensor) -> dict[str, Tensor]:
        """Σ_k Σ_n (∂⟨f(x_n), c_kn⟩/∂θ)² for each of ``weights``, with the output gradients c ``(K, B, …)``."""
        columns, count = cotangents.shape[:2]
        wide = {name: at_least_float32(w.detach()) for name, w in weights.items()}
        totals = {name: torch.zeros_like(w) for name, w in wide.items()}
        sample = 2 * columns * sum(w.numel() * w.element_size() for w in wide.values())
        step = max(1, min(count, self.budget // max(sample, 1)))
        for start in range(0, count, step):
            piece = slice(start, min(start + step, count))
            grads = self._gradients(weights, self.plan.samples.take(batch, piece), cotangents[:, piece])
            for name, rows in grads.items():
                totals[name] += rows.detach().to(totals[name].dtype).square().sum((0, 1))
        return totals

    def _gradients(self, weights: Mapping[str, Tensor], batch: Any, cotangents: Tensor) -> dict[str, Tensor]:
        """``(K, n, *shape)`` by name; one sample after another where vmap fails."""
        detached = {name: w.detach() for name, w in weights.items()}
        if self.plan.vectorised:
            found = vmapped_gradients(self.function, detached, batch, cotangents, self.plan.samples)
            if found is not None and self._holds(found, detached, batch, cotangents):
                return found
            self.plan.vectorised = False
        rows = [
            self._single(detached, self.plan.samples.take(batch, slice(n, n + 1)), cotangents[:, n])
            for n in range(cotangents.shape[1])
        ]
        return {name: torch.stack([row[name] for row in rows], 1) for name in detached}

    def _holds(
        self, found: Mapping[str, Tensor], weights: Mapping[str, Tensor], batch: Any, cotangents: Tensor
    ) -> bool:
        """Whether a random combination of the gradients is what one ordinary backward pass gives for it.

        Operators exist whose batching rule is wrong (PReLU's backward pass in torch 2.13, for some sizes).
        """
        generator = torch.Generator().manual_seed(0)
        factors = torch.randn(cotangents.shape[:2], generator=generator).to(cotangents)
        direction = (cotangents * factors.view(*factors.shape, *(1,) * (cotangents.ndim - 2))).sum(0)
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        outputs = self.function.at(leaves, batch)
        grads = torch.autograd.grad(outputs, list(leaves.values()), direction, allow_unused=True)
        for name, grad in zip(leaves, grads, strict=True):
            rows = found[name]
            combined = torch.tensordot(factors.to(rows), rows, 2)
            missed = combined if grad is None else combined - grad.to_dense()
            error = {torch.float64: 1e-9, torch.float32: 1e-3}.get(rows.dtype, 0.1)
            if not bool(missed.norm() <= error * rows.norm()):
                return False
        return True

    def _single(self, weights: dict[str, Tensor], batch: Any, rows: Tensor) -> dict[str, Tensor]:
        leaves = {name: w.clone().requires_grad_() for name, w in weights.items()}
        outputs = self.function.at(leaves, batch)[0]
        grads = [
            torch.autograd.grad(outputs, list(leaves.values()), row, retain_graph=True, allow_unused=True)
            for row in rows
        ]
        return {
            name: torch.stack([torch.zeros_like(w) if g[i] is None else g[i].to_dense() for g in grads])
            for i, (name, w) in enumerate(leaves.items())
        }


def vmapped_gradients(
    function: Functional, weights: dict[str, Tensor], batch: Any, cotangents: Tensor, samples: Samples
) -> dict[str, Tensor] | None:
    """∂⟨f(x_n), c_kn⟩/∂θ for all samples and output gradients at once: ``(K, B, *shape)`` by name.

    None if vmap does not work: data-dependent control flow, or an operator without a batching rule.
    """
    tensors, rebuild = samples.split(batch)

    def one(sample: list[Tensor], rows: Tensor) -> dict[str, Tensor]:
        def outputs(w: dict[str, Tensor]) -> Tensor:
            return function.at(w, rebuild([t.unsqueeze(0) for t in sample]))[0]

        pullback = torch.func.vjp(outputs, weights)[1]
        return torch.func.vmap(lambda row: pullback(row)[0])(rows)  # type: ignore[no-any-return]

    over_samples = torch.func.vmap(one, in_dims=(0, 1), out_dims=1, randomness="different")
    with warnings.catch_warnings():  # an operator without a batching rule is slower, not wrong
        warnings.filterwarnings("ignore", message="There is a performance drop")
        try:
            return {name: rows.detach() for name, rows in over_samples(tensors, cotangents).items()}
        except (RuntimeError, ValueError, TypeError, NotImplementedError):
            return None
