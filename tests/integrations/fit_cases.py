"""Calls of shaver.fit that one process makes, or several under torchrun, without a word of difference."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import shaver
from shaver.pruning import Online
from shaver.training import Options
from tests.integrations.ddp_cases import mlp

N = 45  # in batches of 11 the last holds one sample: some rank has none
SPAM: dict[str, Any] = {"source": "ef", "every": 2, "decay": 0.8, "update": 3, "burn_in": 0.0}


def data(seed: int = 1) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 3, (N,), generator=generator)
    x = torch.randn(N, 6, generator=generator, dtype=torch.float64)
    x[:, 0] += 2.0 * (y == 1)
    x[:, 1] += 2.0 * (y == 2)
    return TensorDataset(x, y)


def shuffled(seed: int = 1, size: int = 11) -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(data(seed), batch_size=size, shuffle=True)


def line() -> nn.Module:
    """The last rank begins elsewhere, which must not matter."""
    with torch.random.fork_rng():
        torch.manual_seed(int(os.environ.get("RANK", "0")))
        return nn.Linear(6, 1)


class Dropping(nn.Module):
    """Draws random numbers, as many as it has samples, which must not disturb the order of the data."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp().double()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(nn.functional.dropout(x, 0.2, self.training))


class Normed(nn.Module):
    """Has running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.net = nn.BatchNorm1d(6), mlp()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(self.norm(x))


class Failing(nn.Module):
    """Fails in the middle of the second epoch, on the last rank, by an error or by the end of its process."""

    def __init__(self, how: str = "never") -> None:
        super().__init__()
        self.net, self.how, self.calls = mlp(), how, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        if self.calls == 7 and os.environ.get("RANK") == "1":
            if self.how == "dies":
                os._exit(3)
            if self.how == "raises":
                raise ValueError("no more")
        return self.net(x)


#: Name → the network and the arguments of fit.
CASES: dict[str, tuple[Any, dict[str, Any]]] = {
    "spam": (Failing, {"spam": SPAM}),
    "pruned": (mlp, {"spam": SPAM | {"prior": "unit"}, "online": Online(0.6, every=3), "optimizer": "adam"}),
    "epochs": (mlp, {"spam": {"online": False, "source": "ggn", "burn_in": 0}}),
    "map": (mlp, {"method": "map", "options": Options(clip=0.5, accumulate=2)}),
    "regression": (line, {"spam": SPAM, "likelihood": "regression"}),
    "dropout": (Dropping, {"spam": SPAM}),
    "normed": (Normed, {"spam": SPAM}),
}
#: Those that one process repeats: no random numbers of their own, no statistics of a rank's samples.
REPEATED = ("spam", "pruned", "epochs", "map", "regression")


def run(case: str, folder: Path | None = None, epochs: int = 3, build: Any = None) -> dict[str, Tensor]:
    """Train; returns weights, precisions, masks and the columns of the history."""
    make, options = CASES[case]
    model = (build or make)().double()
    train: Any = shuffled(size=15 if case == "normed" else 11)  # batch norm refuses a single sample
    if options.get("likelihood") == "regression":
        x, y = data()[:]
        train = [(a, b.double().unsqueeze(1)) for a, b in zip(x.split(11), y.split(11), strict=True)]
        valid: Any = train
    else:
        valid = shuffled(2)
    history = shaver.fit(model, train, valid, epochs=epochs, folder=folder, **options)
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    if history.posterior is not None:
        found |= {f"precision.{n}": p.clone() for n, p in history.posterior.precision().items()}
    if history.masks is not None:
        found |= {f"mask.{n}": m for n, m in history.masks.items()}
    columns = {name for row in history for name in row} - {"seconds"}
    return found | {
        f"history.{name}": torch.tensor([float(row.get(name, -1)) for row in history]) for name in sorted(columns)
    }


def with_sampler(rank: int, size: int) -> dict[str, Tensor]:
    """Each rank brings its own loader."""
    model = mlp().double()
    sampler: Any = DistributedSampler(data(), size, rank, shuffle=False)
    shaver.fit(model, DataLoader(data(), batch_size=5, sampler=sampler), epochs=2, spam=SPAM)
    return {name: value.detach() for name, value in model.state_dict().items()}
