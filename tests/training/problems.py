"""Small problems the training tests share."""

import random

import numpy as np
import torch
from torch import Tensor, nn


def blobs(samples: int = 96, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Three classes in six dimensions, of which two matter."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (samples,), generator=generator)
    x = torch.randn(samples, 6, generator=generator)
    x[:, 0] += 3.0 * (y == 1)
    x[:, 1] += 3.0 * (y == 2)
    return x, y


def batches(size: int = 16, samples: int = 96, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    x, y = blobs(samples, seed)
    return list(zip(x.split(size), y.split(size), strict=True))


def network(seed: int = 0, dropout: float = 0.0) -> nn.Sequential:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(dropout), nn.Linear(12, 3))


def noisy_forward(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """A forward pass that draws from every global generator, as augmentation code does."""
    x = batch[0]
    if model.training:
        x = x + 0.01 * torch.randn_like(x) + 0.01 * random.random() + 0.01 * float(np.random.rand())
    return model(x)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in model.state_dict().items()}


def identical(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
