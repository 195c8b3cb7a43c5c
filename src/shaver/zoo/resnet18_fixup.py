"""ResNet-18 for small images without normalisation."""

import torch.nn.functional as F
from torch import Tensor, nn

from shaver.zoo.fixup import Bias, FixupBlock, initialise
from shaver.zoo.network import Network, check_images, check_positive


class ResNet18Fixup(Network):
    """A 3×3 stem and four stages of two Fixup blocks with zero-padding shortcuts.

    With 64 planes and ten classes: 10,992,372 parameters, 42 of which are scalars (five per block and two more).

    Args:
        planes: Channels of the first stage; the others have 2, 4 and 8 times as many.
        channels: Colour channels of the input.
        classes: Number of outputs.
    """

    def __init__(self, planes: int = 64, channels: int = 3, classes: int = 10) -> None:
        check_positive(planes=planes, channels=channels, classes=classes)
        super().__init__("resnet18_fixup", planes=planes, channels=channels, classes=classes)
        self.stem = nn.Conv2d(channels, planes, 3, padding=1, bias=False)
        self.bias1 = Bias()
        blocks: list[nn.Module] = []
        inputs = planes
        for stage in range(4):
            outputs = planes * 2**stage
            blocks += [
                FixupBlock(inputs, outputs, 1 if stage == 0 else 2, projection=False),
                FixupBlock(outputs, outputs, 1, projection=False),
            ]
            inputs = outputs
        self.blocks = nn.Sequential(*blocks)
        self.bias2 = Bias()
        self.head = nn.Linear(inputs, classes)
        initialise(self, self.stem, self.head)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of images ``(batch, channels, h, w)``, usually 32×32."""
        check_images(x, self.stem.in_channels)
        x = self.blocks(F.relu(self.bias1(self.stem(x))))
        x = F.adaptive_avg_pool2d(x, 1).flatten(1)
        logits: Tensor = self.head(self.bias2(x))
        return logits
