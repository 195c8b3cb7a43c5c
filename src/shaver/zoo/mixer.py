"""The MLP-Mixer (Tolstikhin et al., 2021)."""

import torch.nn.functional as F
from torch import Tensor, nn

from shaver.zoo.network import Network, check_divides, check_images


class MLP(nn.Module):
    """Linear, GELU, linear over the last dimension."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(width, hidden)
        self.fc2 = nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        """Same shape as ``x``."""
        out: Tensor = self.fc2(F.gelu(self.fc1(x)))
        return out


class MixerBlock(nn.Module):
    """x + MLP over the tokens of LayerNorm(x), then the same over the channels."""

    def __init__(self, tokens: int, dim: int, token_dim: int, channel_dim: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.token_mlp = MLP(tokens, token_dim)
        self.norm2 = nn.LayerNorm(dim)
        self.channel_mlp = MLP(dim, channel_dim)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, tokens, dim)`` to the same shape."""
        x = x + self.token_mlp(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        out: Tensor = x + self.channel_mlp(self.norm2(x))
        return out


class Mixer(Network):
    """Patches become tokens, blocks mix them over positions and over channels, and their mean is classified.

    Args:
        image_size: Side of the image, in pixels.
        channels: Colour channels of the input.
        patch_size: Side of a patch, in pixels; divides ``image_size``.
        dim: Channels per token.
        depth: Number of blocks.
        token_dim: Hidden width of the token-mixing MLPs.
        channel_dim: Hidden width of the channel-mixing MLPs.
        classes: Number of outputs.
    """

    def __init__(
        self,
        image_size: int = 28,
        channels: int = 1,
        patch_size: int = 7,
        dim: int = 128,
        depth: int = 2,
        token_dim: int = 64,
        channel_dim: int = 256,
        classes: int = 10,
    ) -> None:
        super().__init__(
            "mixer",
            image_size=image_size,
            channels=channels,
            patch_size=patch_size,
            dim=dim,
            depth=depth,
            token_dim=token_dim,
            channel_dim=channel_dim,
            classes=classes,
        )
        check_divides("patch_size", patch_size, "image_size", image_size)
        self.image_size = image_size
        self.embed = nn.Conv2d(channels, dim, patch_size, stride=patch_size)
        tokens = (image_size // patch_size) ** 2
        self.blocks = nn.Sequential(*(MixerBlock(tokens, dim, token_dim, channel_dim) for _ in range(depth)))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of images ``(batch, channels, image_size, image_size)``."""
        check_images(x, self.embed.in_channels, self.image_size)
        tokens = self.embed(x).flatten(2).transpose(1, 2)
        logits: Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return logits
