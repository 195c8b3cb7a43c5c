"""Per-sample gradients of one use of a parameter, in factored form, so that they need not be built.

A backward pass with K output gradients gives K gradients per sample and parameter. A *use* holds their factors. From
them it computes the sum of squares (the diagonal), the Kronecker factors, and the gradients themselves for a few
samples at a time (for a parameter that is used in several ways).

Shapes: B samples, K output gradients, T positions (pixels, tokens) per sample, g groups, I inputs, O outputs.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Protocol

import torch
from torch import Tensor

from shaver.curvature import kernels
from shaver.curvature.kernels import Kernel


class Use(Protocol):
    """One way in which a parameter enters the network."""

    def square_sum(self) -> Tensor:
        """Σ_k Σ_n g² over the samples, shaped like the parameter."""

    def per_sample(self, start: int, stop: int) -> Tensor:
        """The gradients of samples start…stop, ``(K, samples, *shape)``."""


@dataclass
class Dense:
    """Gradients that are small enough to be stored: those of norms, of scalars, and of the generic rule.

    Attributes:
        grads: ``(K, B, *shape)``.
    """

    grads: Tensor

    def square_sum(self) -> Tensor:
        """Σ g²."""
        return self.grads.square().sum((0, 1))

    def per_sample(self, start: int, stop: int) -> Tensor:
        """A slice."""
        return self.grads[:, start:stop]


class _Factored:
    """What the uses with Kronecker factors share."""

    grads: Tensor
    groups: int

    def gradient_factor(self, reduce: bool) -> Tensor:
        """G = Σ b bᵀ over positions (expand), or Σ (Σ_t b)(Σ_t b)ᵀ (reduce)."""
        grads = self.grads.sum(-1, keepdim=True) if reduce else self.grads
        return kernels.outer_sum(grads.transpose(0, 1).flatten(0, 1), self.groups)


@dataclass
class Shift(_Factored):
    """A bias: the gradient is the output gradient summed over positions, g_n = Σ_t b_nt.

    Attributes:
        grads: ``(K, B, O, T)``.
        groups: Groups of a grouped convolution; only the Kronecker factors depend on them.
    """

    grads: Tensor
    groups: int = 1

    def square_sum(self) -> Tensor:
        """Σ (Σ_t b)²."""
        return self.grads.sum(-1).square().sum((0, 1))

    def per_sample(self, start: int, stop: int) -> Tensor:
        """Σ_t b."""
        return self.grads[:, start:stop].sum(-1)

    def input_factor(self, reduce: bool) -> tuple[Tensor, int]:
        """A bias has one input that is always 1: the sum and the number of terms are the same."""
        count = self.grads.shape[1] * (1 if reduce else self.grads.shape[-1])
        return self.grads.new_full((self.groups, 1, 1), count), count


@dataclass
class Outer(_Factored):
    """A weight matrix: g_n = Σ_t b_nt a_ntᵀ, with inputs a and output gradients b at T positions.

    Attributes:
        inputs: A function from a slice of samples to their inputs ``(n, g·I, T)``, so that the patches of a convolution
            are in memory for only a few samples at a time.
        grads: ``(K, B, g·O, T)``.
        shape: The parameter's shape, ``(g·O, I, …)`` or, transposed, ``(I, O)``.
        groups: g.
        transposed: Whether the parameter is stored as ``(I, O)``.
        kernel: A faster way to build per-sample gradients than patches, or None; only without groups.
    """

    inputs: Callable[[slice], Tensor]
    grads: Tensor
    shape: torch.Size
    groups: int = 1
    transposed: bool = False
    kernel: Kernel | None = None

    def _to_shape(self, values: Tensor) -> Tensor:
        """``(…, g·O, I)`` → ``(…, *shape)``."""
        values = values.transpose(-1, -2) if self.transposed else values
        return values.reshape(*values.shape[:-2], *self.shape)

    def _tiles(self, numbers: int, beside: int = 0) -> Iterator[slice]:
        return kernels.tiles(self.grads.shape[1], self.grads.element_size(), numbers, beside)

    def square_sum(self) -> Tensor:
        """Σ g² for these output gradients."""
        return self.joint_square_sum([self.grads])

    def joint_square_sum(self, grads: Sequence[Tensor]) -> Tensor:
        """Σ g² for several output gradients of the same samples, each ``(K, B, g·O, T)``.

        With one position this is one matmul of squared factors. With more, per-sample gradients are built in tiles that
        fit the cache, and all output gradients share the inputs.
        """
        _, batch, outputs, positions = self.grads.shape
        columns = sum(len(grad) for grad in grads)
        g, outs = self.groups, outputs // self.groups
        ins = self.shape.numel() // outputs
        if positions == 1:
            squares = [grad.squeeze(-1).square() for grad in grads]
            b = squares[0].squeeze(0) if columns == 1 else torch.cat(squares).sum(0)
            a = self.inputs(slice(None)).squeeze(-1)
            a = a.square()
            if g == 1:
                return self._to_shape(b.t() @ a)
            b, a = b.view(batch, g, outs), a.view(batch, g, ins)
            return self._to_shape(torch.einsum("ngo,ngi->goi", b, a).flatten(0, 1))
        if self.kernel is not None and columns * outputs <= self.kernel.up_to:
            stacked = grads[0] if len(grads) == 1 else torch.cat(list(grads))
            squared: Tensor | None = None
            for piece in self._tiles(columns * self.kernel.numbers):
                b = stacked[:, piece].transpose(0, 1).flatten(1, 2)
                part = self.kernel.gradients(piece, b).square_().sum(1)
                squared = part if squared is None else squared.add_(part)
            assert squared is not None
            return self._to_shape(self.kernel.weights(squared).reshape(columns, outs, ins).sum(0))
        total = self.grads.new_zeros(g, outs, ins)
        for piece in self._tiles(columns * outputs * (ins + positions) + g * ins * positions):
            # (n·g, K·O, T) @ (n·g, T, I)
            a = self.inputs(piece).reshape(-1, ins, positions).transpose(1, 2)
            rows = [grad[:, piece].transpose(0, 1) for grad in grads]  # (n, K, g·O, T)
            b = kernels.grouped(rows[0] if len(rows) == 1 else torch.cat(rows, 1), 2, g).transpose(1, 2)
            part = torch.bmm(b.reshape(len(a), columns * outs, positions), a)
            if len(part) == columns == 1:
                total.addcmul_(part, part)
            else:
                total += part.square_().view(-1, g, columns, outs, ins).sum((0, 2))
        return self._to_shape(total.flatten(0, 1))

    def per_sample(self, start: int, stop: int) -> Tensor:
        """Σ_t b aᵀ, built."""
        a = kernels.grouped(self.inputs(slice(start, stop)), 1, self.groups)
        b = kernels.grouped(self.grads[:, start:stop], 2, self.groups)
        return self._to_shape(torch.einsum("kngot,ngit->kngoi", b, a).flatten(2, 3))

    def input_factor(self, reduce: bool) -> tuple[Tensor, int]:
        """Σ a aᵀ over samples and positions (expand) or of the means over positions (reduce), and the count."""
        _, batch, outputs, positions = self.grads.shape
        ins = self.groups * self.shape.numel() // outputs
        total: Tensor | None = None
        for piece in self._tiles(2 * ins * positions, beside=ins * ins // self.groups):
            inputs = self.inputs(piece)
            inputs = inputs.mean(-1, keepdim=True) if reduce else inputs
            part = kernels.outer_sum(inputs, self.groups)
            total = part if total is None else total.add_(part)
        assert total is not None
        return total, batch * (1 if reduce else positions)


@dataclass
class Rows:
    """An embedding: position t of sample n adds b_nt to row index_nt.

    Attributes:
        index: ``(B, T)``.
        grads: ``(K, B, T, D)``.
        shape: ``(V, D)``.
        padding: The row that gets no gradient, or None.
    """

    index: Tensor
    grads: Tensor
    shape: torch.Size
    padding: int | None = None

    def masked(self) -> Tensor:
        """The gradients, zero at the padding row."""
        if self.padding is None:
            return self.grads
        return self.grads * (self.index != self.padding).unsqueeze(-1)

    def square_sum(self) -> Tensor:
        """Σ g²: equal tokens of one sample are summed before squaring; only rows that occur are computed."""
        batch, rows = len(self.index), self.shape[0]
        key = self.index + rows * torch.arange(batch, device=self.index.device).unsqueeze(1)
        unique, inverse = torch.unique(key.flatten(), return_inverse=True)
        grads = self.masked().flatten(1, 2)
        summed = grads.new_zeros(len(grads), len(unique), grads.shape[-1]).index_add_(1, inverse, grads)
        return grads.new_zeros(self.shape).index_add_(0, unique % rows, summed.square().sum(0))

    def per_sample(self, start: int, stop: int) -> Tensor:
        """One dense table of rows per sample."""
        grads = self.masked()[:, start:stop]
        table = grads.new_zeros(*grads.shape[:2], *self.shape)
        index = self.index[start:stop].unsqueeze(-1).expand(grads.shape)
        return table.scatter_add_(2, index, grads)


def joint_square_sum(uses: Sequence[Use]) -> Tensor:
    """Σ g² of one parameter's uses under several output gradients of the same samples."""
    first = uses[0]
    if isinstance(first, Outer) and len(uses) > 1:
        return first.joint_square_sum([use.grads for use in uses if isinstance(use, Outer)])
    total = first.square_sum()
    for use in uses[1:]:
        total += use.square_sum()
    return total


def merge(uses: Sequence[Use]) -> Use:
    """Several uses of one parameter as one use: their per-sample gradients are summed before squaring.

    The positions of weight matrices are concatenated; everything else is summed for a few samples at a time.
    """
    first = uses[0]
    if len(uses) == 1:
        return first
    outers = [u for u in uses if isinstance(u, Outer)]
    if len(outers) == len(uses) and len({(u.groups, u.transposed) for u in outers}) == 1:
        return replace(
            outers[0],
            inputs=lambda piece: torch.cat([u.inputs(piece) for u in outers], -1),
            grads=torch.cat([u.grads for u in outers], -1),
            kernel=None,
        )
    if isinstance(first, Shift) and all(isinstance(u, Shift) and u.groups == first.groups for u in uses):
        return Shift(torch.cat([u.grads for u in uses if isinstance(u, Shift)], -1), first.groups)
    if isinstance(first, Dense) and all(isinstance(u, Dense) for u in uses):
        return Dense(torch.stack([u.grads for u in uses if isinstance(u, Dense)]).sum(0))
    tables = [u for u in uses if isinstance(u, Rows)]
    matrices = [u for u in outers if u.groups == 1 and not u.transposed and len(u.shape) == 2]
    if tables and len(tables) + len(matrices) == len(uses):
        index, grads = torch.cat([u.index for u in tables], 1), torch.cat([u.masked() for u in tables], 2)
        table = Rows(index, grads, first.shape)  # type: ignore[attr-defined]
        matrix = merge(matrices) if matrices else None
        return Tied(table, matrix) if isinstance(matrix, Outer) else table
    return Several(list(uses))


@dataclass
class Tied:
    """An embedding that is also the output layer: a table and a matrix.

    The gradient of a whole vocabulary is too large to build per sample. It is built for some rows of one sample at a
    time, and the table's gradient of those rows is added before squaring.
    """

    table: Rows
    matrix: Outer

    def square_sum(self) -> Tensor:
        """Σ (g_table + g_matrix)², a tile of rows of one sample at a time."""
        columns, batch, rows, positions = self.matrix.grads.shape
        width = self.matrix.shape[1]
        total = self.matrix.grads.new_zeros(self.matrix.shape)
        step = min(rows, max(1, kernels.TILE // (columns * (width + positions) * total.element_size())))
        looked_up = self.table.masked()
        for n in range(batch):
            inputs = self.matrix.inputs(slice(n, n + 1))[0].t().contiguous()  # (T, I)
            index, order = self.table.index[n].sort()
            added = looked_up[:, n, order]
            for start in range(0, rows, step):
                stop = min(start + step, rows)
                part = self.matrix.grads[:, n, start:stop] @ inputs  # (K, rows, I)
                low, high = (int(torch.searchsorted(index, edge)) for edge in (start, stop))
                part.index_add_(1, index[low:high] - start, added[:, low:high].to(part.dtype))
                total[start:stop] += part.square_().sum(0) if columns > 1 else part.square_()[0]
        return total

    def per_sample(self, start: int, stop: int) -> Tensor:
        """The sum of the two."""
        return self.matrix.per_sample(start, stop).add_(self.table.per_sample(start, stop))


@dataclass
class Several:
    """A parameter used in different ways, such as an embedding that is also the output layer."""

    uses: list[Use]

    def square_sum(self) -> Tensor:
        """Σ (Σ_uses g)², one sample at a time."""
        first = self.uses[0]
        batch = first.grads.shape[1]  # type: ignore[attr-defined]
        return reduce(Tensor.add_, (self.per_sample(n, n + 1).square_().sum((0, 1)) for n in range(batch)))

    def per_sample(self, start: int, stop: int) -> Tensor:
        """The sum of the uses' gradients."""
        return reduce(torch.add, (use.per_sample(start, stop) for use in self.uses))
