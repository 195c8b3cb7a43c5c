"""Trainings with parameters spread over the ranks by fully_shard, and the same by one process."""

from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

from shaver.curvature import kernels
from shaver.integrations.distributed import full_posterior, full_state_dict, hold_sharded, prune_sharded
from shaver.likelihoods import Classification
from shaver.spam import SpaM
from tests.integrations.ddp_cases import QUICK, N, blobs, own


class Net(nn.Module):
    """A layer used twice, a norm, raw parameters, sizes that two ranks cannot share evenly or at all."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.into, self.again, self.norm, self.out = (
                nn.Linear(6, 7),
                nn.Linear(7, 7),
                nn.LayerNorm(7),
                nn.Linear(7, 3),
            )
            self.token = nn.Parameter(torch.randn(7))
            self.place = nn.Parameter(torch.randn(1, 2, 7))
            self.gate = nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = (torch.tanh(self.into(x)).unsqueeze(1) + self.place).mean(1) + self.token
        x = torch.tanh(self.again(x))
        return self.out(self.norm(self.again(x * torch.sigmoid(self.gate(x)))))


class LeastLikely(Classification):
    """Draws the least likely label, so that MC finds the same H however the samples are spread over the ranks."""

    def mc_gradient(self, outputs: Tensor, generator: torch.Generator | None = None) -> Tensor:
        """softmax − one-hot label."""
        probabilities = outputs.softmax(1)
        return probabilities - F.one_hot(probabilities.argmin(1), outputs.shape[1])


CASES: dict[str, dict[str, Any]] = {
    "sgd": {},
    "adam": {},
    "gradient": {"proximal": False},
    "mean": {"loss": "mean"},
    "unit": {"prior": "unit"},
    "layer": {"prior": "layer"},
    "scalar": {"prior": "scalar"},
    "mc": {"source": "mc", "likelihood": LeastLikely()},
    "mc by layer": {"source": "mc", "likelihood": LeastLikely()},  # squared as gradients arrive, as in a large network
}


def start(case: str, size: int) -> tuple[nn.Module, SpaM, torch.optim.Optimizer]:
    model = Net().double()
    if size > 1:
        for layer in (model.into, model.again):
            fully_shard(layer)
        fully_shard(model)
    spam = SpaM(model, N, **({"source": "ef"} | QUICK | CASES[case]))
    if case == "adam":
        return model, spam, torch.optim.Adam(model.parameters(), lr=0.01)
    return model, spam, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def train(
    model: nn.Module,
    spam: SpaM,
    optimizer: torch.optim.Optimizer,
    rank: int,
    size: int,
    epochs: int,
    masks: dict[str, Tensor] | None = None,
) -> None:
    x, y = blobs()
    width = 11 if spam.settings.loss == "auto" else 22  # a mean needs as many samples on every rank
    for _ in range(epochs):
        for whole in zip(x.split(width), y.split(width), strict=True):
            a, b = own(whole, rank, size)
            optimizer.zero_grad()
            loss = F.cross_entropy(model(a), b, reduction="sum") * size / len(whole[0])
            loss.backward()
            spam.step(optimizer)
            if masks is not None:
                hold_sharded(spam, masks)


def run(case: str, rank: int = 0, size: int = 1) -> dict[str, Tensor]:
    """Train; returns whole weights, precisions, masks, and what a state dict holds."""
    model, spam, optimizer = start(case, size)
    with patch.object(kernels, "STREAMED", 0 if case == "mc by layer" else kernels.STREAMED):
        train(model, spam, optimizer, rank, size, 3)
    assert spam.updates >= 2
    numbers = spam.statistics()
    posterior = full_posterior(spam)
    found = {f"theta.{n}": t.clone() for n, t in posterior.theta.items()}
    found |= {f"precision.{n}": p.clone() for n, p in posterior.precision().items()}
    state = full_state_dict(spam)
    found |= {f"delta.{n}": v.clone() for n, v in state["prior"]["values"].items()}
    found |= {f"statistics.{n}": torch.tensor([v]) for n, v in numbers.items()}
    masks = prune_sharded(model, spam, 0.6)
    found |= {f"mask.{n}": m.full_tensor() if hasattr(m, "full_tensor") else m for n, m in masks.items()}
    train(model, spam, optimizer, rank, size, 1, masks)  # fine-tuning: what is gone stays gone
    after = full_posterior(spam).theta
    assert all(not after[n][~found[f"mask.{n}"]].any() for n in masks)
    return found | {f"tuned.{n}": after[n].clone() for n in masks}
