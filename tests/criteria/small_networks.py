"""Small float64 networks with unequal batches, shared by the tests of the criteria."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Batches = list[tuple[Tensor, Tensor]]


class Attention(nn.Module):
    """One attention block with the fused kernel, and a module used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(4, 12)
        self.mix = nn.Linear(4, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, 2)).permute(2, 0, 3, 1, 4)
        x = self.mix(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return self.head(self.mix(x).mean(1))


def networks() -> dict[str, tuple[nn.Module, Batches]]:
    generator = torch.Generator().manual_seed(1)

    def data(*shape: int) -> Batches:
        return [
            (
                torch.randn(n, *shape, generator=generator, dtype=torch.float64),
                torch.randint(0, 3, (n,), generator=generator),
            )
            for n in (4, 7, 2)
        ]

    cases = {
        "perceptron": (nn.Sequential(nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3)), data(5)),
        "convolution": (
            nn.Sequential(
                nn.Conv2d(2, 4, 3, stride=2, padding=1, groups=2),
                nn.BatchNorm2d(4),
                nn.Softplus(),
                nn.Flatten(),
                nn.Linear(16, 3),
            ),
            data(2, 4, 4),
        ),
        "attention": (Attention(), data(3, 4)),
    }
    for model, _ in cases.values():
        model.double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.6)
    return cases
