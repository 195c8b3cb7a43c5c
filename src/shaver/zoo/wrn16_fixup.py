"""Wide ResNet without normalisation."""

import torch.nn.functional as F
from torch import Tensor, nn

from shaver.zoo.fixup import Bias, FixupBlock, initialise
from shaver.zoo.network import Network, check_images, check_positive
from shaver.zoo.wrn16 import blocks_per_stage


class WRN16Fixup(Network):
    """A 3×3 stem of 16 channels and three wide stages of Fixup blocks with 1×1 convolutions as shortcuts.

    WRN-16-4 has 2,745,306 parameters for 10 classes and 2,768,436 for 100.

    Args:
        depth: Number of layers, 6n + 4 with n blocks per stage.
        widen: Widening factor w: the stages have 16w, 32w and 64w channels.
        channels: Colour channels of the input.
        classes: Number of outputs.
    """

    def __init__(self, depth: int = 16, widen: int = 4, channels: int = 3, classes: int = 10) -> None:
        check_positive(depth=depth, widen=widen, channels=channels, classes=classes)
        count = blocks_per_stage(depth)
        super().__init__("wrn16_fixup", depth=depth, widen=widen, channels=channels, classes=classes)
        self.stem = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        self.bias1 = Bias()
        blocks: list[nn.Module] = []
        inputs = 16
        for stage in range(3):
            outputs = 16 * widen * 2**stage
            for index in range(count):
                stride = 2 if stage > 0 and index == 0 else 1
                blocks.append(FixupBlock(inputs, outputs, stride, projection=True))
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
