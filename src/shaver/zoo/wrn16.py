"""Wide ResNet (Zagoruyko and Komodakis, 2016), with BatchNorm and without normalisation."""

import torch.nn.functional as F
from torch import Tensor, nn

from shaver.zoo.fixup import FixupNetwork
from shaver.zoo.network import Network, check_images, check_positive, stages
from shaver.zoo.resnet18 import initialise_convolutions


class WideBlock(nn.Module):
    """Pre-activation: shortcut + conv2(ReLU(BN(conv1(ReLU(BN(x)))))).

    Where the shape changes, the shortcut is a 1×1 convolution of the activated input.

    Args:
        inputs: Channels of the input.
        outputs: Channels of the output.
        stride: Stride of the first convolution and the shortcut.
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


class WRN16(Network):
    """A 3×3 stem of 16 channels and three wide stages: WRN-16-4 has 2,748,890 parameters for ten classes.

    Args:
        depth: Number of layers, 6n + 4 with n blocks per stage.
        widen: Widening factor w: the stages have 16w, 32w and 64w channels.
        channels: Colour channels of the input.
        classes: Number of outputs.
    """

    def __init__(self, depth: int = 16, widen: int = 4, channels: int = 3, classes: int = 10) -> None:
        check_positive(depth=depth, widen=widen, channels=channels, classes=classes)
        count = blocks_per_stage(depth)
        super().__init__("wrn16", depth=depth, widen=widen, channels=channels, classes=classes)
        self.stem = nn.Conv2d(channels, 16, 3, padding=1, bias=False)
        widths = [16 * widen * 2**stage for stage in range(3)]
        self.blocks = stages(WideBlock, 16, widths, count)
        self.norm = nn.BatchNorm2d(widths[-1])
        self.head = nn.Linear(widths[-1], classes)
        initialise_convolutions(self)

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
        check_positive(depth=depth, widen=widen, channels=channels, classes=classes)
        widths, count = [16 * widen * 2**stage for stage in range(3)], blocks_per_stage(depth)
        options = {"depth": depth, "widen": widen, "channels": channels, "classes": classes}
        super().__init__(16, widths, count, projection=True, name="wrn16_fixup", **options)


def blocks_per_stage(depth: int) -> int:
    """The number n of blocks per stage of a wide residual network with 6n + 4 layers."""
    count, rest = divmod(depth - 4, 6)
    if rest or count < 1:
        raise ValueError(f"a wide residual network has 6n + 4 layers (10, 16, 22, 28, …), not depth={depth}.")
    return count
