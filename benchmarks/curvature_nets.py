"""The networks of the curvature benchmark, each with the shape of its random inputs."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shaver.zoo


@dataclass(frozen=True)
class Net:
    """One network of the benchmark.

    Attributes:
        title: Its name in the table.
        build: Builds a copy; the weights are always the same.
        shape: Shape of one input.
        images: Default number of inputs; smaller for larger networks.
        classes: Number of classes.
        vocabulary: If set, inputs are token indices below this number instead of pixels.
    """

    title: str
    build: Callable[[], nn.Module]
    shape: tuple[int, ...]
    images: int
    classes: int = 10
    vocabulary: int | None = None

    def data(self, images: int) -> tuple[Tensor, Tensor]:
        """Random inputs and labels; the cost of a pass does not depend on their values."""
        generator = torch.Generator().manual_seed(0)
        labels = torch.randint(self.classes, (images,), generator=generator)
        if self.vocabulary is not None:
            return torch.randint(self.vocabulary, (images, *self.shape), generator=generator), labels
        return torch.randn(images, *self.shape, generator=generator), labels


def sequential_lenet() -> nn.Module:
    """The zoo's LeNet as one ``nn.Sequential``: BackPACK's second-order extensions need this form."""
    torch.manual_seed(0)
    return nn.Sequential(
        *(nn.Conv2d(1, 6, 5), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(6, 16, 3), nn.ReLU(), nn.MaxPool2d(2)),
        *(nn.Conv2d(16, 120, 5), nn.ReLU(), nn.Flatten()),
        *(nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
    )


class EncoderLayer(nn.Module):
    """Pre-norm attention and MLP. Every projection is an ``nn.Linear``, as in the transformers library."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.query, self.key, self.value, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, tokens, dim)`` to the same shape."""
        batch, tokens, dim = x.shape
        normed = self.norm1(x)
        q, k, v = (
            layer(normed).reshape(batch, tokens, self.heads, -1).transpose(1, 2)
            for layer in (self.query, self.key, self.value)
        )
        mixed = (q @ k.mT / math.sqrt(dim // self.heads)).softmax(-1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Encoder(nn.Module):
    """Token and position embeddings, four encoder layers, a mean over tokens and a head."""

    def __init__(
        self, layer: Callable[[], nn.Module], dim: int = 128, vocabulary: int = 1000, tokens: int = 256
    ) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, dim)
        self.positions = nn.Parameter(torch.randn(tokens, dim) * 0.02)
        self.layers = nn.Sequential(*(layer() for _ in range(4)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, tokens)`` indices to ``(batch, 10)``."""
        return self.head(self.norm(self.layers(self.tokens(x) + self.positions)).mean(1))


def encoder() -> nn.Module:
    torch.manual_seed(0)
    return Encoder(lambda: EncoderLayer(128, 4))


def torch_encoder() -> nn.Module:
    """The same network from torch's own layers, whose attention packs its projections into raw parameters."""
    torch.manual_seed(0)
    return Encoder(lambda: nn.TransformerEncoderLayer(128, 4, 512, dropout=0.0, batch_first=True, norm_first=True))


def from_zoo(name: str, **arguments: int) -> Callable[[], nn.Module]:
    return lambda: shaver.zoo.build(name, seed=0, **arguments)


IMAGE = (3, 32, 32)
NETS = {
    "lenet": Net("LeNet, 28×28", sequential_lenet, (1, 28, 28), 6400),
    "wrn16": Net("WRN-16-4 with BatchNorm, 32×32", from_zoo("wrn16"), IMAGE, 256),
    "wrn16_fixup": Net("WRN-16-4 with Fixup, 32×32", from_zoo("wrn16_fixup"), IMAGE, 256),
    "vit": Net("ViT with patches of 4, 32×32", from_zoo("vit", image_size=32, channels=3, patch_size=4), IMAGE, 512),
    "encoder": Net("Transformer encoder, 4 layers, 256 tokens", encoder, (256,), 128, vocabulary=1000),
    "encoder_torch": Net("torch.nn encoder, 4 layers, 256 tokens", torch_encoder, (256,), 128, vocabulary=1000),
    "resnet18_fixup": Net("Fixup ResNet-18, 64 planes, 32×32", from_zoo("resnet18_fixup"), IMAGE, 128),
}
