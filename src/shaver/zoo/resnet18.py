"""ResNet-18 with BatchNorm for small images (He et al., 2016)."""

import torch.nn.functional as F
from torch import Tensor, nn

from shaver.zoo.network import Network, check_images, check_positive


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
        blocks: list[nn.Module] = []
        inputs = planes
        for stage in range(4):
            outputs = planes * 2**stage
            blocks += [ResidualBlock(inputs, outputs, 1 if stage == 0 else 2), ResidualBlock(outputs, outputs, 1)]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.head = nn.Linear(inputs, classes)
        initialise_convolutions(self)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of images ``(batch, channels, h, w)``, usually 32×32."""
        check_images(x, self.stem.in_channels)
        x = self.blocks(F.relu(self.norm(self.stem(x))))
        logits: Tensor = self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))
        return logits


def initialise_convolutions(network: nn.Module) -> None:
    """He initialisation by fan-out, as in the papers on residual networks."""
    for module in network.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
