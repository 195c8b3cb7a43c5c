"""The Vision Transformer (Dosovitskiy et al., 2021)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.zoo.mixer import MLP
from shaver.zoo.network import Network, check_divides, check_images


class Attention(nn.Module):
    """Multi-head self-attention with one linear layer for queries, keys and values and one for the output.

    The rows of ``qkv`` are all queries, then all keys, then all values; within each, one head after another. The
    number of heads follows from the layer's width, so heads can be removed by removing their rows.
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.head_dim = dim // heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    @property
    def heads(self) -> int:
        """Number of heads present."""
        return self.qkv.out_features // (3 * self.head_dim)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, tokens, dim)`` to the same shape."""
        batch, tokens, _ = x.shape
        q, k, v = self.qkv(x).reshape(batch, tokens, 3, self.heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        mixed = F.scaled_dot_product_attention(q, k, v)
        out: Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return out


class TransformerBlock(nn.Module):
    """x + attention of LayerNorm(x), then x + MLP of LayerNorm(x)."""

    def __init__(self, dim: int, heads: int, mlp_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = MLP(dim, mlp_dim)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, tokens, dim)`` to the same shape."""
        x = x + self.attention(self.norm1(x))
        out: Tensor = x + self.mlp(self.norm2(x))
        return out


class ViT(Network):
    """A class token and patches with learned positions, and pre-norm transformer blocks: 275,210 parameters.

    Args:
        image_size: Side of the image, in pixels.
        channels: Colour channels of the input.
        patch_size: Side of a patch, in pixels; divides ``image_size``.
        dim: Channels per token.
        depth: Number of blocks.
        heads: Attention heads per block; divides ``dim``.
        mlp_dim: Hidden width of a block's MLP.
        classes: Number of outputs.
    """

    def __init__(
        self,
        image_size: int = 28,
        channels: int = 1,
        patch_size: int = 7,
        dim: int = 128,
        depth: int = 2,
        heads: int = 4,
        mlp_dim: int = 256,
        classes: int = 10,
    ) -> None:
        super().__init__(
            "vit",
            image_size=image_size,
            channels=channels,
            patch_size=patch_size,
            dim=dim,
            depth=depth,
            heads=heads,
            mlp_dim=mlp_dim,
            classes=classes,
        )
        check_divides("patch_size", patch_size, "image_size", image_size)
        check_divides("heads", heads, "dim", dim)
        self.image_size = image_size
        self.embed = nn.Conv2d(channels, dim, patch_size, stride=patch_size)
        self.class_token = nn.Parameter(torch.randn(1, 1, dim) * 0.02)
        self.position = nn.Parameter(torch.randn(1, 1 + (image_size // patch_size) ** 2, dim) * 0.02)
        self.blocks = nn.Sequential(*(TransformerBlock(dim, heads, mlp_dim) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of images ``(batch, channels, image_size, image_size)``."""
        check_images(x, self.embed.in_channels, self.image_size)
        patches = self.embed(x).flatten(2).transpose(1, 2)
        tokens = torch.cat([self.class_token.expand(len(x), -1, -1), patches], 1) + self.position
        logits: Tensor = self.head(self.norm(self.blocks(tokens))[:, 0])
        return logits
