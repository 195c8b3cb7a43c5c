"""Weights whose scale the function does not see, such as filters before a BatchNorm, and the prior on their direction.

If f(c·w) = f(w) for every c > 0, then ⟨∇f, w⟩ = 0 (Euler). This is how such weights are found: from the gradients of
the first steps, whatever the modules are called. A learned δ must not act on their length. It would not regularise the
function, but it would change the effective step size, lr/‖w‖², and leave the statistics of the norm behind. Ordinary
weight decay acts on their length to set that step size, and so does the initial precision.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from shaver.shards import local

#: Steps whose gradients are compared with the weights.
STEPS = 8
#: d·cos² of the angle between gradient and weights is 1 on average for random directions in d dimensions. A mean
#: below this counts as zero.
ORTHOGONAL = 0.02


class ScaleFree:
    """Finds groups of rows whose scale has no effect, and keeps their norms while the prior acts.

    BatchNorm after a layer frees the scale of each row of its weight; GroupNorm frees that of several rows together,
    LayerNorm that of the whole matrix. The finest of these divisions that fits is taken.

    Args:
        theta: The trainable parameters by name.

    Attributes:
        groups: Name → number of equal groups of rows, for the parameters found.
    """

    def __init__(self, theta: Mapping[str, Tensor]) -> None:
        self.groups: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self.select(theta)
        self._sums: dict[str, dict[int, list[float]]] = {}
        self.steps = 0

    def select(self, theta: Mapping[str, Tensor]) -> None:
        """Follow a network whose tensors were replaced or sliced. Rows that were free by themselves remain so."""
        self._theta = {name: p for name, p in theta.items() if p.ndim > 1 and p.numel()}
        rows = {name: len(local(p)) for name, p in self._theta.items()}
        self.groups = {
            name: rows[name] if count == self._rows[name] else count
            for name, count in self.groups.items()
            if name in rows and (count == self._rows[name] or rows[name] % count == 0)
        }
        self._rows = rows

    @property
    def by_parameter(self) -> dict[Tensor, int]:
        """Parameter → number of groups."""
        return {self._theta[name]: count for name, count in self.groups.items() if name in self._theta}

    def observe(self) -> None:
        """Compare the current gradients with the weights; after ``STEPS`` calls decide, then do nothing."""
        if self.steps < STEPS:
            self._compare()

    @torch.no_grad()
    def _compare(self) -> None:
        self.steps += 1
        for name, parameter in self._theta.items():
            own = local(parameter)
            if parameter.grad is None or parameter.grad.is_sparse or not own.numel():  # no rows of a shard here
                continue
            dtype = torch.promote_types(own.dtype, torch.float32)
            w, g = own.flatten(1).to(dtype), local(parameter.grad).flatten(1).to(dtype)
            products, lengths = (w * g).sum(1), torch.stack([w.square().sum(1), g.square().sum(1)])
            sums = self._sums.setdefault(name, {})
            for count in _divisions(len(w)) if own is parameter else [len(w)]:
                inner = products.view(count, -1).sum(1)
                length = lengths.view(2, count, -1).sum(2).prod(0)
                used = (length > 0) & length.isfinite()
                if bool(used.any()):
                    ratio = inner[used].square() / length[used] * (w.numel() / count)
                    total = sums.setdefault(count, [0.0, 0.0])
                    total[0] += float(ratio.sum())
                    total[1] += int(used.sum())
        if self.steps == STEPS:
            for name, sums in self._sums.items():
                fits = [count for count, (total, seen) in sums.items() if seen >= STEPS and total < ORTHOGONAL * seen]
                if fits:
                    self.groups[name] = max(fits)
            self._sums.clear()

    def state(self) -> dict[str, Any]:
        """Everything needed to resume."""
        sums = {name: {str(count): list(total) for count, total in of.items()} for name, of in self._sums.items()}
        return {"groups": dict(self.groups), "steps": self.steps, "sums": sums}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state` returned."""
        self.groups, self.steps = dict(state["groups"]), state["steps"]
        self._sums = {
            name: {int(count): list(total) for count, total in of.items()} for name, of in state["sums"].items()
        }


@contextmanager
def kept_norms(weights: Sequence[Tensor], groups: Mapping[Tensor, int]) -> Iterator[None]:
    """Restore the norm of every scale-free group of rows at the end of the block; groups that became zero stay zero."""
    free = [(local(w), groups[w]) for w in weights if w in groups]
    views = [w.view(count, -1) for w, count in free]
    before = [torch.linalg.vector_norm(v, dim=1, keepdim=True) for v in views]
    yield
    for view, norm in zip(views, before, strict=True):
        now = torch.linalg.vector_norm(view, dim=1, keepdim=True)
        view.mul_(torch.where(now > 0, norm / now, 1.0))


def remove_radial(gradient: Tensor, weight: Tensor, count: int) -> None:
    """Subtract, for each of ``count`` groups of rows, the part of the gradient along the weights; in place."""
    g, w = gradient.view(count, -1), weight.view(count, -1)
    square = w.square().sum(1, keepdim=True)
    g.sub_(w * torch.where(square > 0, (g * w).sum(1, keepdim=True) / square, 0.0))


def _divisions(rows: int) -> list[int]:
    """Numbers of equal groups of rows that are tried: every row, every second power of two of them, all together."""
    return [
        rows,
        *(count for count in (32, 16, 8, 4, 2) if count < rows and rows % count == 0),
        *([1] if rows > 1 else []),
    ]
