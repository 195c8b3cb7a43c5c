"""Trainings that can be run by one process or by several: each takes its part of the same global batches."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shaver
from shaver.settings import PAPER
from shaver.spam import SpaM

N = 44
QUICK: dict[str, Any] = {"every": 2, "decay": 0.8, "update": 3, "burn_in": 0.0}


def blobs() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 3, (N,), generator=generator)
    x = torch.randn(N, 6, generator=generator, dtype=torch.float64)
    x[:, 0] += 2.0 * (y == 1)
    x[:, 1] += 2.0 * (y == 2)
    return x, y


def own(batch: tuple[Tensor, Tensor], rank: int, size: int) -> tuple[Tensor, Tensor]:
    """This rank's part of a batch; parts may differ by one sample."""
    return tuple(part.tensor_split(size)[rank] for part in batch)  # type: ignore[return-value]


def mlp() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Odd(nn.Module):
    """A raw parameter, a tied weight and a parameter that no rule covers."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.mix, self.out = nn.Linear(6, 6), nn.Linear(6, 3)
            self.token = nn.Parameter(torch.randn(6))
            self.bend = nn.Parameter(torch.rand(6))

    def forward(self, x: Tensor) -> Tensor:
        x = torch.tanh(self.mix(x)) + self.token
        x = torch.tanh(self.mix(x)) * self.bend.softmax(0)
        return self.out(x)


#: Name → network, SpaM's options, and the sizes of the global batches.
CASES: dict[str, tuple[Any, dict[str, Any], int]] = {
    "mlp": (mlp, {"source": "ef"}, 8),
    "uneven": (mlp, {"source": "ef", "prior": "unit"}, 15),  # 8 + 7 samples, and 14 in the last batch
    "odd": (Odd, {"source": "ef", "prior": "layer"}, 8),
    "mean": (mlp, {"source": "ef", "loss": "mean"}, 8),
    "gradient": (mlp, {"source": "ef", "proximal": False, "method": "gradient"}, 8),
    "epochs": (mlp, {"settings": PAPER}, 8),
    "kron": (mlp, {"structure": "kron"}, 8),
    "mc": (mlp, {"source": "mc"}, 8),
}


def run(name: str, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
    """Train a case; returns weights, δ, H, masks at 50 % and a few numbers."""
    build, options, batch = CASES[name]
    model = build().double()
    wrapped: nn.Module = nn.parallel.DistributedDataParallel(model) if size > 1 else model
    by_epochs = "settings" in options or "structure" in options
    spam = SpaM(wrapped, N, **({} if by_epochs else QUICK), **options)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, y = blobs()
    batches = list(zip(x.split(batch), y.split(batch), strict=True))
    for _ in range(3):
        for whole in batches:
            a, b = own(whole, rank, size)
            optimizer.zero_grad()
            outputs = wrapped(a)
            if size == 1:
                loss = F.cross_entropy(outputs, b)
            else:  # DDP takes the mean over ranks, whatever their sizes
                loss = F.cross_entropy(outputs, b, reduction="sum") * size / len(whole[0])
                if options.get("loss") == "mean":
                    loss = F.cross_entropy(outputs, b)
            loss.backward()
            spam.step(optimizer)
        spam.end_epoch([own(whole, rank, size) for whole in batches])
    assert spam.updates >= 3
    masks = shaver.prune(model, shaver.score(model, "opd", posterior=spam.posterior), sparsity=0.5).masks
    found = {f"theta.{n}": p.detach().clone() for n, p in model.named_parameters()}
    found |= {f"delta.{n}": d.expand(spam.theta[n].shape).clone() for n, d in spam.prior.delta().items()}
    found |= {f"h.{n}": h.clone() for n, h in spam.curvature.diagonal().items()}
    found |= {f"mask.{n}": m for n, m in masks.items()}
    if options.get("loss") != "mean":  # which is not told the likelihood
        found["likelihood"] = torch.tensor([spam.curvature.log_likelihood])
    return found
