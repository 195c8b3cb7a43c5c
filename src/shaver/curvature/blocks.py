"""The curvature H of the negative log likelihood, one block per parameter, diagonal or Kronecker."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from shaver.ranks import Ranks
from shaver.selection import Dims, Selection, take

#: Elements of a weight that are treated together: few enough for a core's cache.
PIECE = 2**18


def at_least_float32(values: Tensor) -> Tensor:
    """Half-precision values as float32, in which curvature is accumulated; all others unchanged."""
    return values.float() if values.is_floating_point() and values.element_size() < 4 else values


def row_pieces(values: Tensor) -> Iterator[slice | EllipsisType]:
    """Indices of a large tensor's rows, a few at a time, so that they stay in a core's cache; all of a small one."""
    if values.numel() <= PIECE:
        yield ...
        return
    step = max(1, PIECE * len(values) // values.numel())
    yield from (slice(start, start + step) for start in range(0, len(values), step))


def summed(function: Callable[..., Tensor], first: Tensor, *others: Tensor) -> Tensor:
    """Σ function(first, *others) in float64, without a temporary as large as the tensors.

    The function works element by element; ``others`` broadcast to the shape of ``first``.
    """
    whole = [first, *(other.expand_as(first) for other in others)]
    parts = [function(*(values[rows] for values in whole)).sum(dtype=torch.float64) for rows in row_pieces(first)]
    return torch.stack(parts).sum()


@dataclass
class DiagonalBlock:
    """The diagonal of H for one parameter: ``values`` has its shape and one sum over the data per weight."""

    values: Tensor

    @property
    def shape(self) -> torch.Size:
        """The parameter's shape."""
        return self.values.shape

    def diagonal(self) -> Tensor:
        """H_pp, shaped like the parameter."""
        return self.values

    def scale(self, factor: float) -> None:
        """Multiply H by ``factor`` in place."""
        self.values.mul_(factor)

    def tensors(self) -> dict[str, Tensor]:
        """What a file has to keep."""
        return {"values": self.values}

    def select(self, dims: Dims) -> "DiagonalBlock":
        """The block of the kept part of the parameter."""
        return DiagonalBlock(take(self.values, dims))


@dataclass
class KroneckerBlock:
    """H ≈ A ⊗ G for one parameter seen as ``(groups, out, in)`` matrices.

    A, ``(groups, in, in)``, is the *mean* over samples and positions of the input's outer product; G,
    ``(groups, out, out)``, is the *sum* of the output gradients' outer products. So A ⊗ G estimates the sum over the
    data. Entry ((o, i), (o', i')) of a group's block is G[o, o'] · A[i, i'].

    A bias is a matrix with one input that is always 1: ``in`` is 1 and A is one.

    Attributes:
        A: Input covariance, ``(groups, in, in)``.
        G: Gradient covariance, ``(groups, out, out)``.
        shape: The parameter's own shape.
        transposed: Whether the parameter is stored as ``(in, out)``, as in the transformers library's Conv1D.
    """

    A: Tensor
    G: Tensor
    shape: torch.Size
    transposed: bool = False

    def to_matrix(self, values: Tensor) -> Tensor:
        """A tensor shaped like the parameter, as ``(groups, out, in)``."""
        groups, out, inputs = len(self.A), self.G.shape[-1], self.A.shape[-1]
        if self.transposed:
            return values.reshape(inputs, out).t().unsqueeze(0)
        return values.reshape(groups, out, inputs)

    def from_matrix(self, matrix: Tensor) -> Tensor:
        """The inverse of :meth:`to_matrix`."""
        return (matrix[0].t() if self.transposed else matrix).reshape(self.shape)

    def diagonal(self) -> Tensor:
        """H_pp = G_oo · A_ii exactly, shaped like the parameter."""
        a, g = self.A.diagonal(dim1=-2, dim2=-1), self.G.diagonal(dim1=-2, dim2=-1)
        return self.from_matrix(g.unsqueeze(-1) * a.unsqueeze(-2))

    def scale(self, factor: float) -> None:
        """Multiply H by ``factor`` in place."""
        self.G.mul_(factor)

    def tensors(self) -> dict[str, Tensor]:
        """What a file has to keep."""
        return {"A": self.A, "G": self.G}

    def select(self, dims: Dims) -> "KroneckerBlock":
        """The block of the kept part of the parameter: rows and columns of A for its inputs, of G for its outputs."""
        if not dims:
            return self
        groups, out, inputs = len(self.A), self.G.shape[-1], self.A.shape[-1]
        number = torch.arange(groups * out * inputs).reshape(groups, out, inputs)
        kept = take(self.from_matrix(number), dims)
        is_kept = torch.zeros(number.numel(), dtype=torch.bool)
        is_kept[kept.reshape(-1)] = True
        is_kept = is_kept.reshape(number.shape)
        A, G = [], []
        for group in is_kept.any(2).any(1).nonzero().squeeze(1).tolist():
            o, i = is_kept[group].any(1).nonzero().squeeze(1), is_kept[group].any(0).nonzero().squeeze(1)
            A.append(take(self.A[group], {0: i, 1: i}))
            G.append(take(self.G[group], {0: o, 1: o}))
        return KroneckerBlock(torch.stack(A), torch.stack(G), kept.shape, self.transposed)


Block = DiagonalBlock | KroneckerBlock


@dataclass
class Curvature:
    """H for a whole model: one block per trainable parameter, and the log likelihood at the same weights.

    Attributes:
        blocks: Parameter name → block, in the order of ``model.named_parameters()``.
        log_likelihood: Σ_n log p(y_n | x_n, θ) over the data.
        data_size: N. H and the log likelihood are sums over N samples, or estimates of such sums.
        structure: ``"diag"`` or ``"kron"``.
        source: ``"ggn"``, ``"ef"`` or ``"mc"``.
        rules: Parameter name → the rule that computed its block, in words.
    """

    blocks: dict[str, Block]
    log_likelihood: float
    data_size: int
    structure: str
    source: str
    rules: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[tuple[str, Block]]:
        return iter(self.blocks.items())

    def diagonal(self) -> dict[str, Tensor]:
        """H_pp of every parameter, by name, shaped like the parameter."""
        return {name: block.diagonal() for name, block in self.blocks.items()}

    def select(self, kept: Selection, added: Mapping[str, Tensor] | None = None) -> "Curvature":
        """H of a smaller network with the kept positions of each parameter. ``added`` parameters start at zero."""
        blocks = {name: block.select(kept.get(name, {})) for name, block in self}
        blocks |= {n: DiagonalBlock(torch.zeros_like(at_least_float32(p.detach()))) for n, p in (added or {}).items()}
        rest = (self.log_likelihood, self.data_size, self.structure, self.source)
        return Curvature(blocks, *rest, {**self.rules, **dict.fromkeys(added or (), "added, not yet estimated")})

    def sum_over_ranks(self, ranks: Ranks) -> "Curvature":
        """Sum this curvature over the samples of all ranks, in place. A collective.

        A diagonal is a sum, and so is G of a Kronecker block. A is a mean and is weighted by its number of samples.
        """
        if not ranks:
            return self
        size, log_likelihood = ranks.total(self.data_size, self.log_likelihood)
        tensors: list[Tensor] = []
        for _, block in self:
            if isinstance(block, KroneckerBlock):
                block.A.mul_(self.data_size / size)
            tensors += block.tensors().values()
        ranks.sum_(tensors)
        self.data_size, self.log_likelihood = int(size), log_likelihood
        return self

    def coverage(self) -> str:
        """A table with one line per parameter: name, shape and the rule that computed its block."""
        rows = [(name, "×".join(map(str, block.shape)) or "scalar", self.rules.get(name, "?")) for name, block in self]
        head = ("parameter", "shape", "rule")
        widths = [max(len(row[i]) for row in [head, *rows]) for i in range(2)]
        return "\n".join(f"{n:<{widths[0]}}  {s:<{widths[1]}}  {r}" for n, s, r in [head, *rows])

    def state_dict(self) -> dict[str, object]:
        """Tensors and plain values, enough for :meth:`from_state_dict`; holds no code."""
        blocks: dict[str, object] = {
            name: block.tensors() | {"shape": list(block.shape), "transposed": block.transposed}
            if isinstance(block, KroneckerBlock)
            else block.tensors()
            for name, block in self
        }
        return vars(self) | {"blocks": blocks, "rules": dict(self.rules)}

    @classmethod
    def from_state_dict(cls, state: dict[str, Any]) -> "Curvature":
        """Rebuild from :meth:`state_dict`."""
        blocks: dict[str, Block] = {
            name: DiagonalBlock(e["values"])
            if "values" in e
            else KroneckerBlock(e["A"], e["G"], torch.Size(e["shape"]), bool(e["transposed"]))
            for name, e in state["blocks"].items()
        }
        return cls(**{**state, "blocks": blocks})
