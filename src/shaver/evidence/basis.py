"""One parameter's H + δ in the basis where H is diagonal: log determinant, γ and effective number of parameters.

A diagonal block is its own basis. For a Kronecker block A ⊗ G with A = Q_A Λ_A Q_Aᵀ and G = Q_G Λ_G Q_Gᵀ the
eigenvalues are λ_G λ_Aᵀ as an (out, in) matrix. One δ for the whole parameter adds to them exactly. Any other
diagonal δ is projected by the paper's Proposition 1 to mat(δ̂) = (Q_Gᵀ)² mat(δ) Q_A², the diagonal in the eigenbasis
nearest to diag(δ) in the Frobenius norm. No Kronecker product is ever formed. For a unit prior, mat(δ) = b aᵀ has rank
one, so matrix-vector products are enough.
"""

from collections.abc import Sequence
from types import EllipsisType

import torch
from torch import Tensor

from shaver.curvature.blocks import Curvature, DiagonalBlock, KroneckerBlock, at_least_float32, summed
from shaver.layouts import Axes, Layout


class DiagonalBasis:
    """H/T of a parameter with a diagonal block, T the temperature: λ_p = h_p/T, δ̂ = δ and γ_p = λ_p / (λ_p + δ_p)."""

    def __init__(self, name: str, block: DiagonalBlock, temperature: float = 1.0) -> None:
        values = at_least_float32(block.values.detach())
        self.values, self.temperature = values, temperature
        if values.numel():
            low, high = torch.aminmax(values)
            if not (bool(low >= 0) and bool(high.isfinite())):  # NaN fails both
                raise FloatingPointError(
                    f"the curvature of {name!r} is not finite and non-negative for every weight (from {low.item():g} "
                    f"to {high.item():g}); training has diverged or the likelihood's Hessian is wrong."
                )

    def eigenvalues(self, rows: slice | EllipsisType = ...) -> Tensor:
        """λ ≥ 0 of some rows or of all, computed on each call so that no second copy of H is kept."""
        return self.values[rows] if self.temperature == 1 else self.values[rows] / self.temperature

    def project(self, delta: Tensor, factors: int = 1) -> Tensor:
        """δ̂, broadcastable to the eigenvalues: δ itself."""
        return delta

    def log_det(self, projected: Tensor) -> Tensor:
        """log |H + δ| as a float64 scalar, a piece at a time."""
        return summed(lambda h, delta: (h / self.temperature + delta).log_(), self.values, projected)

    def effective(self, projected: Tensor) -> Tensor:
        """Σ_p γ_p = Σ_p h_p / (h_p + δ_p T) as a float64 scalar, a piece at a time."""
        return summed(lambda h, delta: h / (h + self.temperature * delta), self.values, projected)

    def gamma(self, delta: Tensor, projected: Tensor) -> Tensor:
        """γ_p = 1 − δ_p Σ_pp in the parameter's shape: how much the data, not the prior, determine weight p.

        ∂ log|H + δ| / ∂ log δ_p = δ_p Σ_pp also holds for the projected determinant. So the derivative of the
        evidence by log δ_p is ½ (γ_p − δ_p θ_p²) for both structures.
        """
        values = self.eigenvalues()
        return values / (values + delta)

    def gamma_sums(self, delta: Tensor, projected: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
        """Σ γ_p over the groups of each layout; ``delta`` is the product of one factor per layout."""
        return _gamma_sums(self, delta, projected, layouts)

    def covariance_root(self, values: Tensor, projected: Tensor) -> Tensor:
        """Σ^½ v = v / √(λ + δ) with Σ = (H + δ)⁻¹, for each v in a batch ``(n, *shape)``."""
        return values / (self.eigenvalues() + projected).sqrt()


class KroneckerBasis:
    """H/T in the eigenbasis of a Kronecker block. The block caches the decomposition until its factors change."""

    def __init__(self, name: str, block: KroneckerBlock, temperature: float = 1.0) -> None:
        (self.values_a, self.vectors_a), (self.values_g, self.vectors_g) = _decomposition(name, block)
        self.block, self.temperature = block, temperature

    def eigenvalues(self) -> Tensor:
        """λ_G λ_Aᵀ, ``(groups, out, in)``."""
        return (self.values_g / self.temperature).unsqueeze(-1) * self.values_a.unsqueeze(-2)

    def project(self, delta: Tensor, factors: int = 1) -> Tensor:
        """(Q_Gᵀ)² mat(δ) Q_A², with element-wise squares. One δ for the whole parameter does not change.

        With the two ``factors`` of a unit prior, δ has rank one.
        """
        if delta.numel() == 1:
            return delta.reshape(())
        if factors > 1:
            b, a = self._sides(delta)
            return (self.vectors_g.square().mT @ b) * (self.vectors_a.square().mT @ a).mT
        return self.vectors_g.square().mT @ self._matrix(delta) @ self.vectors_a.square()

    def log_det(self, projected: Tensor) -> Tensor:
        """log |H + δ| as a float64 scalar."""
        return (self.eigenvalues() + projected).log_().sum(dtype=torch.float64)

    def effective(self, projected: Tensor) -> Tensor:
        """Σ_p γ_p = Σ_k λ_k / (λ_k + δ̂_k) as a float64 scalar, without cancellation."""
        eigenvalues = self.eigenvalues()
        return (eigenvalues / (eigenvalues + projected)).sum(dtype=torch.float64)

    def gamma_sums(self, delta: Tensor, projected: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
        """For δ = b aᵀ, Σ_i δ_oi Σ_oi = b_o (Q_G² R Q_A²ᵀ a)_o with R = 1/(Λ + δ̂), and likewise for the inputs."""
        if len(layouts) == 1 or delta.numel() == 1:
            return _gamma_sums(self, delta, projected, layouts)
        b, a = self._sides(delta)
        squared_g, squared_a = self.vectors_g.square(), self.vectors_a.square()
        spread = (self.eigenvalues() + projected).reciprocal_()
        by_output = b * (squared_g @ (spread @ (squared_a.mT @ a)))
        by_input = a * (squared_a @ (spread.mT @ (squared_g.mT @ b)))
        outputs, inputs = by_output.shape[-2], by_input.shape[-2]
        sums = []
        for layout in layouts:
            assert isinstance(layout, Axes)
            # A layout of one side sums over the whole other side, so its sum may be spread evenly there.
            on_outputs = layout.keep == ((1,) if self.block.transposed else (0,))
            known = by_output / inputs if on_outputs else by_input.mT / outputs
            sums.append(layout.reduce(1 - self.block.from_matrix(known.expand_as(spread))))
        return sums

    def _matrix(self, delta: Tensor) -> Tensor:
        return self.block.to_matrix(delta.to(self.values_a.dtype).expand(self.block.shape))

    def _sides(self, delta: Tensor) -> tuple[Tensor, Tensor]:
        """Columns b and a of mat(δ) = b aᵀ."""
        matrix = self._matrix(delta)
        return matrix[..., :1], (matrix[..., :1, :] / matrix[..., :1, :1]).mT

    def unproject(self, matrix: Tensor) -> Tensor:
        """diag(Q diag(x) Qᵀ) for x in the eigenbasis: Q_G² mat(x) (Q_A²)ᵀ, in the parameter's shape."""
        return self.block.from_matrix(self.vectors_g.square() @ matrix @ self.vectors_a.square().mT)

    def gamma(self, delta: Tensor, projected: Tensor) -> Tensor:
        """1 − δ_p Σ_pp with Σ = Q (Λ + δ̂)⁻¹ Qᵀ; computed without the subtraction if δ is a single value."""
        eigenvalues = self.eigenvalues()
        if delta.numel() == 1:
            return self.unproject(eigenvalues / (eigenvalues + projected))
        return 1 - delta * self.unproject((eigenvalues + projected).reciprocal_())

    def covariance_root(self, values: Tensor, projected: Tensor) -> Tensor:
        """Q_G [(Q_Gᵀ mat(v) Q_A) / √(Λ + δ̂)] Q_Aᵀ."""
        matrices = torch.stack([self.block.to_matrix(v) for v in values])
        scaled = (self.vectors_g.mT @ matrices @ self.vectors_a) / (self.eigenvalues() + projected).sqrt()
        turned = self.vectors_g @ scaled @ self.vectors_a.mT
        return torch.stack([self.block.from_matrix(matrix) for matrix in turned])


Basis = DiagonalBasis | KroneckerBasis


def make_bases(curvature: Curvature, temperature: float = 1.0) -> dict[str, Basis]:
    """The basis of every parameter, for blocks of either structure."""
    return {
        name: KroneckerBasis(name, block, temperature)
        if isinstance(block, KroneckerBlock)
        else DiagonalBasis(name, block, temperature)
        for name, block in curvature
    }


def _gamma_sums(basis: Basis, delta: Tensor, projected: Tensor, layouts: Sequence[Layout]) -> list[Tensor]:
    if all(layout.uniform for layout in layouts):
        return [basis.effective(projected) for _ in layouts]
    gamma = basis.gamma(delta, projected)
    return [layout.reduce(gamma) for layout in layouts]


_Eigen = tuple[Tensor, Tensor]
_Kept = tuple[Tensor, Tensor, tuple[int, int], tuple[_Eigen, _Eigen]]


def _decomposition(name: str, block: KroneckerBlock) -> tuple[_Eigen, _Eigen]:
    """Eigendecompositions of A and G, computed again only if the factors have changed."""
    versions = (block.A._version, block.G._version)
    kept: _Kept | None = vars(block).get("_eigen")
    if kept is None or kept[0] is not block.A or kept[1] is not block.G or kept[2] != versions:
        both = (eigen(block.A, f"factor A of {name!r}"), eigen(block.G, f"factor G of {name!r}"))
        kept = (block.A, block.G, versions, both)
        vars(block)["_eigen"] = kept
    return kept[3]


def eigen(factor: Tensor, what: str) -> _Eigen:
    """Eigenvalues ≥ 0 and eigenvectors of a batch of covariances, ``(…, n, n)``.

    If float32 fails, the decomposition is repeated in float64 on the CPU. Eigenvalues that are negative because of
    rounding become 0.

    Raises:
        FloatingPointError: The factor is not finite, or is indefinite beyond rounding.
    """
    matrix = at_least_float32(factor.detach())
    if not bool(matrix.isfinite().all()):
        raise FloatingPointError(f"{what} holds NaN or infinity; training has diverged.")
    try:
        values, vectors = torch.linalg.eigh(matrix)
        failed = not bool(values.isfinite().all() & vectors.isfinite().all())
    except RuntimeError:  # torch.linalg.LinAlgError, or the errors of vendor libraries
        failed = True
    if failed:
        exact_values, exact_vectors = torch.linalg.eigh(matrix.double().cpu())
        values, vectors = exact_values.to(matrix), exact_vectors.to(matrix)
    lowest, largest = values.amin(-1), values.abs().amax(-1)
    tolerance = 10 * max(factor.shape[-1], 10) * torch.finfo(matrix.dtype).eps
    indefinite = lowest < -tolerance * largest
    if bool(indefinite.any()):
        raise FloatingPointError(
            f"{what} is indefinite: its eigenvalues run from {lowest[indefinite][0].item():g} to "
            f"{largest[indefinite][0].item():g}, but a covariance has no negative ones."
        )
    return values.clamp_min_(0), vectors
