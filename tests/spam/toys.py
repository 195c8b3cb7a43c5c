"""Small problems for SpaM, in float64 unless told otherwise."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.spam import SpaM

N = 96

#: Options under which δ is learned within a few steps.
QUICK: dict[str, Any] = {"every": 2, "decay": 0.8, "update": 3, "burn_in": 0.0}


def blobs(samples: int = N, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Three classes in six dimensions, of which the first two matter."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (samples,), generator=generator)
    x = torch.randn(samples, 6, generator=generator, dtype=torch.float64)
    x[:, 0] += 2.0 * (y == 1)
    x[:, 1] += 2.0 * (y == 2)
    return x, y


def images(samples: int = 24, seed: int = 1) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (samples,), generator=generator)
    x = torch.randn(samples, 1, 5, 5, generator=generator, dtype=torch.float64)
    x[:, 0, 2, 2] += 2.0 * y
    return x, y


def split(data: tuple[Tensor, Tensor], size: int = 16) -> list[tuple[Tensor, Tensor]]:
    return list(zip(data[0].split(size), data[1].split(size), strict=True))


def seeded(build: Any, seed: int = 0) -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = build()
    assert isinstance(model, nn.Module)
    return model.double()


def mlp() -> nn.Module:
    return seeded(lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)))


def conv() -> nn.Module:
    layers = lambda: nn.Sequential(  # noqa: E731
        nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 3)
    )
    return seeded(layers)


def sgd(model: nn.Module, lr: float = 0.1, momentum: float = 0.9, **options: Any) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum, **options)


def train(
    model: nn.Module,
    spam: SpaM,
    optimizer: torch.optim.Optimizer,
    batches: list[tuple[Tensor, Tensor]],
    epochs: int = 1,
) -> None:
    """The loop of the README."""
    for _ in range(epochs):
        for x, y in batches:
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            spam.step(optimizer)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], rtol: float = 1e-10) -> None:
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name], b[name], rtol=rtol, atol=rtol * float(b[name].abs().max()), msg=name)
