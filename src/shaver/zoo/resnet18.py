"""ResNet-18 for small images (He et al., 2016), with BatchNorm and without normalisation."""

import torch.nn.functional as F
from torch import Tensor, nn

from shaver.zoo.fixup import FixupNetwork
from shaver.zoo.network import Network, check_images, check_positive, stages


class ResidualBlock(nn.Module):
    """ReLU(shortcut(x) + BN(conv2(ReLU(BN(conv1(x)))))).

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        stride: Stride of the first convolution and the shortcut.
    """

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


class ResNet18(Network):
    """A 3×3 stem without pooling and four stages of two blocks: 11,173,962 parameters for ten classes.

    Args:
        planes: Channels of the first stage; the others have 2, 4 and 8 times as many.
        channels: Colour channels of the input.
        classes: Number of outputs.
    """

    def __init__(self, planes: int = 64, channels: int = 3, classes: int = 10) -> None:
        check_positive(planes=planes, channels=channels, classes=classes)
        super().__init__("resnet18", planes=planes, channels=channels, classes=classes)
        self.stem = nn.Conv2d(channels, planes, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(planes)
        widths = [planes * 2**stage for stage in range(4)]
        self.blocks = stages(ResidualBlock, planes, widths, 2)
        self.head = nn.Linear(widths[-1], classes)
        initialise_convolutions(self)

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
        check_positive(planes=planes, channels=channels, classes=classes)
        widths = [planes * 2**stage for stage in range(4)]
        options = {"planes": planes, "channels": channels, "classes": classes}
        super().__init__(planes, widths, 2, projection=False, name="resnet18_fixup", **options)


def initialise_convolutions(network: nn.Module) -> None:
    """He initialisation by fan-out, as in the papers on residual networks."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
