"""The log evidence against laplace-torch's log marginal likelihood, from laplace's own curvature and from ours."""

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shaver.curvature
from shaver.curvature.blocks import Curvature, DiagonalBlock, KroneckerBlock
from shaver.evidence import log_evidence

laplace = pytest.importorskip("laplace")

N = 40


def classification():
    torch.manual_seed(0)
    x = torch.randn(N, 5, dtype=torch.float64)
    y = (x[:, 0] > 0).long() + (x[:, 1] > 0.5).long()
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=1e-3)
    for _ in range(60):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model, DataLoader(TensorDataset(x, y), batch_size=N)


def regression():
    torch.manual_seed(1)
    x = torch.randn(N, 4, dtype=torch.float64)
    y = torch.stack([x[:, 0].sin(), x[:, 1] * x[:, 2]], 1)
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)).double()
    return model, DataLoader(TensorDataset(x, y), batch_size=N)


PROBLEMS = {"classification": classification, "regression": regression}


def peer(likelihood, structure, precision):
    model, loader = PROBLEMS[likelihood]()
    fitted = laplace.Laplace(
        model, likelihood, subset_of_weights="all", hessian_structure=structure, prior_precision=precision
    )
    fitted.fit(loader)
    return model, loader, fitted


def borrowed(model, fitted):
    """Our curvature object filled with laplace's H."""
    names = [name for name, _ in model.named_parameters()]
    shapes = {name: p.shape for name, p in model.named_parameters()}
    if isinstance(fitted.H, torch.Tensor):
        pieces = fitted.H.split([s.numel() for s in shapes.values()])
        blocks = {n: DiagonalBlock(piece.reshape(shapes[n])) for n, piece in zip(names, pieces, strict=True)}
        structure = "diag"
    else:
        one, structure = torch.ones(1, 1, 1, dtype=torch.float64), "kron"
        blocks = {
            n: KroneckerBlock(f[1][None] if len(f) == 2 else one, f[0][None], shapes[n])
            for n, f in zip(names, fitted.H_facs.kfacs, strict=True)
        }
    return Curvature(blocks, float(fitted.log_likelihood), N, structure, "ggn")


def precisions(kind, model):
    """The prior as laplace wants it and as we do."""
    generator = torch.Generator().manual_seed(3)
    named = dict(model.named_parameters())
    if kind == "scalar":
        return torch.tensor(0.37, dtype=torch.float64), 0.37
    size = len(named) if kind == "layer" else sum(p.numel() for p in named.values())
    flat = torch.rand(size, generator=generator, dtype=torch.float64) * 3 + 0.05
    if kind == "layer":
        return flat, dict(zip(named, flat.tolist(), strict=True))
    pieces = flat.split([p.numel() for p in named.values()])
    return flat, {n: piece.reshape(named[n].shape) for n, piece in zip(named, pieces, strict=True)}


CASES = [(k, s) for k in ("scalar", "layer") for s in ("diag", "kron")] + [("parameter", "diag")]


@pytest.mark.parametrize("own", [False, True], ids=["their-curvature", "our-curvature"])
@pytest.mark.parametrize("likelihood", list(PROBLEMS))
@pytest.mark.parametrize(("kind", "structure"), CASES)
def test_log_evidence_agrees(kind, structure, likelihood, own):
    theirs, ours = precisions(kind, PROBLEMS[likelihood]()[0])
    model, loader, fitted = peer(likelihood, structure, theirs)
    if own:
        curvature = shaver.curvature.estimate(model, loader, likelihood=likelihood, structure=structure, source="ggn")
    else:
        curvature = borrowed(model, fitted)
    expected = float(fitted.log_marginal_likelihood(theirs))
    assert log_evidence(model, curvature, prior_precision=ours) == pytest.approx(expected, rel=1e-5)
