"""Residual blocks that train without normalisation (Zhang, Dauphin and Ma, 2019, "Fixup Initialization").

A network has L residual branches of m = 2 convolutions each. The last convolution of a branch and the classifier start
at zero. The first convolution of a branch is He-initialised and multiplied by L^(−1/(2m−2)) = L^(−1/2). There is a
scalar bias before every convolution, activation and linear layer, and a scalar multiplier at the end of every branch.
"""

import math
from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.zoo.network import Network, check_images, stages


class Bias(nn.Module):
    """Adds one learned number, initially zero; the parameter has shape ``(1,)``."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` + bias."""
        return x + self.bias


class Scale(nn.Module):
    """Multiplies by one learned number, initially one; the parameter has shape ``(1,)``."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x: Tensor) -> Tensor:
        """``x`` · scale."""
        return x * self.scale


class FixupBlock(nn.Module):
    """ReLU(shortcut(x) + scale · conv2(ReLU(conv1(x)))) with a scalar bias before and after each convolution.

    Where the shape changes, the shortcut is a 1×1 convolution without bias if ``projection``. Otherwise it takes
    every ``stride``-th pixel and appends channels of zeros, without parameters.
    """

    def __init__(self, inputs: int, outputs: int, stride: int, projection: bool) -> None:
        super().__init__()
        self.stride = stride
        self.bias1a = Bias()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.bias1b = Bias()
        self.bias2a = Bias()
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.scale = Scale()
        self.bias2b = Bias()
        self.projection: nn.Conv2d | None = None
        if projection and (stride != 1 or inputs != outputs):
            self.projection = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, inputs, h, w)`` to ``(batch, outputs, h / stride, w / stride)``."""
        biased = self.bias1a(x)
        branch = F.relu(self.bias1b(self.conv1(biased)))
        branch = self.bias2b(self.scale(self.conv2(self.bias2a(branch))))
        if self.projection is not None:
            return F.relu(branch + self.projection(biased))
        x = F.avg_pool2d(x, 1, self.stride) if self.stride != 1 else x
        # The number of appended channels is read from the convolution, so that it is right after removing channels.
        extra = self.conv2.out_channels - x.shape[1]
        return F.relu(branch + (F.pad(x, (0, 0, 0, 0, 0, extra)) if extra else x))


class FixupNetwork(Network):
    """A 3×3 stem, stages of Fixup blocks, and a classifier."""

    @torch.no_grad()
    def make_layers(
        self, channels: int, stem: int, widths: Sequence[int], count: int, classes: int, *, projection: bool
    ) -> None:
        """Make and initialise the layers: a stem of ``stem`` channels and ``count`` blocks for each of the widths."""
        self.stem = nn.Conv2d(channels, stem, 3, padding=1, bias=False)
        self.bias1 = Bias()
        self.blocks = stages(partial(FixupBlock, projection=projection), stem, widths, count)
        self.bias2 = Bias()
        self.head = nn.Linear(widths[-1], classes)
        _he(self.stem)
        for block in self.blocks:
            assert isinstance(block, FixupBlock)
            _he(block.conv1)
            block.conv1.weight.mul_(len(self.blocks) ** -0.5)
            block.conv2.weight.zero_()
            if block.projection is not None:
                _he(block.projection)
        self.head.weight.zero_()
        self.head.bias.zero_()

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of images ``(batch, channels, h, w)``, usually 32×32."""
        check_images(x, self.stem.in_channels)
        x = self.blocks(F.relu(self.bias1(self.stem(x))))
        logits: Tensor = self.head(self.bias2(F.adaptive_avg_pool2d(x, 1).flatten(1)))
        return logits


def _he(conv: nn.Conv2d) -> None:
    nn.init.normal_(conv.weight, std=math.sqrt(2 / (conv.out_channels * math.prod(conv.kernel_size))))
