"""One list of parameters of every sort, their curvature by hand, and the dense float64 evidence by definition."""

import torch
from torch import Tensor

from shaver.curvature.blocks import Curvature, DiagonalBlock, KroneckerBlock
from shaver.priors import make_prior

KINDS = ["scalar", "layer", "unit", "parameter"]
STRUCTURES = ["diag", "kron"]

#: name → shape, groups of its Kronecker block (0: diagonal in both structures), stored (in, out)
PARAMETERS = {
    "conv.weight": ((4, 3, 2, 1), 1, False),
    "conv.bias": ((4,), 1, False),
    "grouped.weight": ((4, 2, 2), 2, False),
    "one_channel.weight": ((1, 2, 3), 1, False),
    "transposed.weight": ((3, 5), 1, True),
    "norm.weight": ((4,), 0, False),
    "embedding.weight": ((5, 3), 0, False),
    "positions": ((1, 4, 2), 0, False),
    "scale": ((), 0, False),
}


def covariance(n: int, groups: int, generator: torch.Generator) -> Tensor:
    factor = torch.randn(groups, n, n + 2, generator=generator, dtype=torch.float64)
    return factor @ factor.mT / (n + 2)


def make_theta(seed: int = 0, scale: float = 0.5) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: scale * torch.randn(shape, generator=generator, dtype=torch.float64)
        for name, (shape, _, _) in PARAMETERS.items()
    }


def make_curvature(structure: str, seed: int = 1, size: float = 20.0) -> Curvature:
    generator = torch.Generator().manual_seed(seed)
    blocks = {}
    for name, (shape, groups, transposed) in PARAMETERS.items():
        if structure == "diag" or groups == 0:
            blocks[name] = DiagonalBlock(size * torch.rand(shape, generator=generator, dtype=torch.float64))
            continue
        out = shape[1] if transposed else shape[0] // groups
        inputs = torch.Size(shape).numel() // (out * groups)
        A = covariance(inputs, groups, generator) if len(shape) > 1 else torch.ones(groups, 1, 1, dtype=torch.float64)
        blocks[name] = KroneckerBlock(A, size * covariance(out, groups, generator), torch.Size(shape), transposed)
    return Curvature(blocks, log_likelihood=-37.5, data_size=50, structure=structure, source="ggn")


def dense_factors(block: DiagonalBlock | KroneckerBlock) -> list[tuple[Tensor, Tensor]]:
    """(H, Q) of each independent piece of a block, in the parameter's own flat order; Q diagonalises H."""
    if isinstance(block, DiagonalBlock):
        flat = block.values.flatten()
        return [(torch.diag(flat), torch.eye(len(flat), dtype=flat.dtype))]
    pieces = []
    for A, G in zip(block.A, block.G, strict=True):
        (_, QA), (_, QG) = torch.linalg.eigh(A), torch.linalg.eigh(G)
        first, second = (A, G) if block.transposed else (G, A)
        Q = torch.kron(QA, QG) if block.transposed else torch.kron(QG, QA)
        pieces.append((torch.kron(first, second), Q))
    return pieces


def dense_posterior(block: DiagonalBlock | KroneckerBlock, delta: Tensor, temperature: float = 1.0) -> Tensor:
    """H/T + δ with δ projected onto the diagonal in H's eigenbasis, as one dense matrix."""
    pieces = dense_factors(block)
    flat = delta.expand(block.shape).flatten().chunk(len(pieces))
    parts = []
    for (H, Q), d in zip(pieces, flat, strict=True):
        projected = torch.diag(torch.diag(Q.T @ torch.diag(d) @ Q))
        parts.append(H / temperature + Q @ projected @ Q.T)
    return torch.block_diag(*parts)


def dense_evidence(
    curvature: Curvature, theta: dict[str, Tensor], delta: dict[str, Tensor], temperature: float = 1.0
) -> Tensor:
    value = torch.tensor(curvature.log_likelihood / temperature, dtype=torch.float64)
    for name, block in curvature:
        d = delta[name].expand(block.shape)
        value = value - 0.5 * (d * theta[name] ** 2).sum() + 0.5 * d.log().sum()
        value = value - 0.5 * torch.logdet(dense_posterior(block, d, temperature))
    return value


def by_hand(kind: str, values: dict[str, Tensor]) -> dict[str, Tensor]:
    """δ of every parameter from a prior's numbers, written out."""
    if kind == "scalar":
        return dict.fromkeys(PARAMETERS, values["scalar"])
    if kind in ("layer", "parameter"):
        return {name: values[name] for name in PARAMETERS}
    units = {
        "conv.weight": values.get("conv.weight[0]")[:, None, None, None]
        * values.get("conv.weight[1]")[None, :, None, None],
        "grouped.weight": torch.einsum("o,i->oi", values["grouped.weight[0]"], values["grouped.weight[1]"])[..., None],
        "one_channel.weight": torch.outer(values["one_channel.weight[1]"], values["one_channel.weight[2]"])[None],
        "transposed.weight": torch.outer(values["transposed.weight[0]"], values["transposed.weight[1]"]),
        "embedding.weight": torch.outer(values["embedding.weight[0]"], values["embedding.weight[1]"]),
        "positions": torch.outer(values["positions[1]"], values["positions[2]"])[None],
    }
    return units | {name: values[name] for name in ("conv.bias", "norm.weight", "scale")}


def random_prior(kind: str, seed: int = 2, spread: float = 1.0):
    """A prior whose numbers are all different."""
    generator = torch.Generator().manual_seed(seed)
    prior = make_prior(kind, make_theta())
    for factor in prior.factors:
        noise = torch.randn(factor.values.shape, generator=generator, dtype=torch.float64)
        factor.values = (spread * noise).exp()
    return prior
