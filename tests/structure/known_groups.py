"""Small networks whose groups are written out by hand."""

import torch
from torch import Tensor, nn

from shaver.structure import Group, Groups, Slice


def one_each(units: int) -> Tensor:
    return torch.arange(units).unsqueeze(1)


def layer(
    name: str, units: int, makes: list[str], reads: str, positions: int = 1, kind: str = "channels"
) -> tuple[str, Group]:
    """The units of a layer: rows of what makes them, columns of what reads them, ``positions`` columns a unit."""
    slices = [Slice(tensor, 0, one_each(units), "makes") for tensor in makes]
    slices.append(Slice(reads, 1, torch.arange(units * positions).reshape(units, positions), "reads"))
    return name, Group(name, kind, units, tuple(slices))


def fcn() -> tuple[nn.Module, Groups]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 8), nn.ReLU(), nn.Linear(8, 12), nn.ReLU(), nn.Linear(12, 3))
    groups = [
        layer("0", 8, ["0.weight", "0.bias"], "2.weight", kind="hidden"),
        layer("2", 12, ["2.weight", "2.bias"], "4.weight", kind="hidden"),
    ]
    return model, Groups(dict(groups))


def cnn() -> tuple[nn.Module, Groups]:
    """Convolution, BatchNorm, ReLU, flattened 2×2 maps: every kind of slice but heads."""
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(),
        nn.Linear(6 * 4, 10), nn.Tanh(), nn.Linear(10, 3),
    )  # fmt: skip
    with torch.no_grad():
        for tensor in (model[1].weight, model[1].bias, model[1].running_mean, model[1].running_var):
            tensor.uniform_(0.5, 1.5)
    norm = [f"1.{name}" for name in ("weight", "bias", "running_mean", "running_var")]
    groups = [
        layer("0", 6, ["0.weight", "0.bias", *norm], "5.weight", positions=4),
        layer("5", 10, ["5.weight", "5.bias"], "7.weight", kind="hidden"),
    ]
    return model.eval(), Groups(dict(groups))


def images(count: int = 4) -> Tensor:
    return torch.randn(count, 1, 6, 6, generator=torch.Generator().manual_seed(1))
