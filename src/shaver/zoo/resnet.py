"""Residual networks for small images: ResNet-18 and Wide ResNet, with BatchNorm and without normalisation."""

import torch.nn.functional as F
from torch import Tensor, nn

from shaver.zoo.fixup import FixupNetwork
from shaver.zoo.network import Network, check_images, stages


class ResidualBlock(nn.Module):
    """ReLU(shortcut(x) + BN(conv2(ReLU(BN(conv1(x)))))). The first convolution and the shortcut have the stride."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or inputs != outputs:
            self.shortcut = nn.Sequential(
                nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False), nn.BatchNorm2d(outputs)
            )

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, inputs, h, w)`` to ``(batch, outputs, h / stride, w / stride)``."""
        branch = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(branch + self.shortcut(x))


class WideBlock(nn.Module):
    """Pre-activation: shortcut + conv2(ReLU(BN(conv1(ReLU(BN(x)))))).

    Where the shape changes, the shortcut is a 1×1 convolution of the activated input.
    """

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.norm1 = nn.BatchNorm2d(inputs)
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride=stride, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.projection: nn.Conv2d | None = None
        if stride != 1 or inputs != outputs:
            self.projection = nn.Conv2d(inputs, outputs, 1, stride=stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, inputs, h, w)`` to ``(batch, outputs, h / stride, w / stride)``."""
        active = F.relu(self.norm1(x))
        branch: Tensor = self.conv2(F.relu(self.norm2(self.conv1(active))))
        return branch + (x if self.projection is None else self.projection(active))


class ResNet18(Network):
    """A 3×3 stem without pooling and four stages of two blocks (He et al., 2016).

    There are 11,173,962 parameters for ten classes.

    Args:
        planes: Channels of the first stage; the others have 2, 4 and 8 times as many.
        channels: Colour channels of the input.
        classes: Number of outputs.
    """

    def __init__(self, planes: int = 64, channels: int = 3, classes: int = 10) -> None:
        super().__init__("resnet18", planes=planes, channels=channels, classes=classes)
        self.stem = nn.Conv2d(channels, planes, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(planes)
        widths = [planes * 2**stage for stage in range(4)]
        self.blocks = stages(ResidualBlock, planes, widths, 2)
        self.head = nn.Linear(widths[-1], classes)
        _initialise_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of images ``(batch, channels, h, w)``, usually 32×32."""
        check_images(x, self.stem.in_channels)
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        logits: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


class ResNet18Fixup(FixupNetwork):
    """A 3×3 stem and four stages of two Fixup blocks with zero-padding shortcuts.

    With 64 planes and ten classes: 10,992,372 parameters, 42 of which are scalars (five per block and two more). The
    arguments are those of :class:`ResNet18`.
    """

    def __init__(self, planes: int = 64, channels: int = 3, classes: int = 10) -> None:
        super().__init__("resnet18_fixup", planes=planes, channels=channels, classes=classes)
        widths = [planes * 2**stage for stage in range(4)]
        self.make_layers(channels, planes, widths, 2, classes, projection=False)


class WRN16(Network):
    """A 3×3 stem of 16 channels and three wide stages (Zagoruyko and Komodakis, 2016).

    WRN-16-4 has 2,748,890 parameters for ten classes.

    Args:
        depth: Number of layers, 6n + 4 with n blocks per stage.
        widen: Widening factor w: the stages have 16w, 32w and 64w channels.
        channels: Colour channels of the input.
        classes: Number of outputs.
    """

    def __init__(self, depth: int = 16, widen: int = 4, channels: int = 3, classes: int = 10) -> None:
        super().__init__("wrn16", depth=depth, widen=widen, channels=channels, classes=classes)
        self.stem = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        widths = [16 * widen * 2**stage for stage in range(3)]
        self.blocks = stages(WideBlock, 16, widths, _blocks_per_stage(depth))
        self.norm = nn.BatchNorm2d(widths[-1])
        self.head = nn.Linear(widths[-1], classes)
        _initialise_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of images ``(batch, channels, h, w)``, usually 32×32."""
        check_images(x, self.stem.in_channels)
        x = F.relu(self.norm(self.blocks(self.stem(x))))
        logits: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


class WRN16Fixup(FixupNetwork):
    """A 3×3 stem of 16 channels and three wide stages of Fixup blocks with 1×1 convolutions as shortcuts.

    WRN-16-4 has 2,745,306 parameters for 10 classes and 2,768,436 for 100. The arguments are those of :class:`WRN16`.
    """

    def __init__(self, depth: int = 16, widen: int = 4, channels: int = 3, classes: int = 10) -> None:
        super().__init__("wrn16_fixup", depth=depth, widen=widen, channels=channels, classes=classes)
        widths = [16 * widen * 2**stage for stage in range(3)]
        self.make_layers(channels, 16, widths, _blocks_per_stage(depth), classes, projection=True)


def _initialise_convolutions(network: nn.Module) -> None:
    """He initialisation by fan-out, as in the papers on residual networks."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def _blocks_per_stage(depth: int) -> int:
    """The number n of blocks per stage of a wide residual network with 6n + 4 layers."""
    count, rest = divmod(depth - 4, 6)
    if rest or count < 1:
        raise ValueError(f"a wide residual network has 6n + 4 layers (10, 16, 22, 28, …), not depth={depth}.")
    return count
