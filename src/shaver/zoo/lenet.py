"""LeNet-5 with ReLU and max-pooling."""

import torch.nn.functional as F
from torch import Tensor, nn

from shaver.zoo.network import Network, check_images, check_positive


class LeNet(Network):
    """Three convolutions with 6, 16 and 120 channels, and two linear layers with 84 units and one per class.

    The kernel sizes are 5-3-5 for 28 pixels and 5-5-5 for 32, so that the third convolution has one output pixel.
    There are 60,170 parameters for one channel of 28 pixels and 62,006 for three channels of 32.

    Args:
        image_size: Side of the image, 28 or 32 pixels.
        channels: Colour channels of the input.
        classes: Number of outputs.
    """

    def __init__(self, image_size: int = 28, channels: int = 1, classes: int = 10) -> None:
        check_positive(channels=channels, classes=classes)
        if image_size not in (28, 32):
            raise ValueError(f"LeNet reads images of 28 or 32 pixels, not image_size={image_size!r}.")
        super().__init__("lenet", image_size=image_size, channels=channels, classes=classes)
        self.image_size = image_size
        self.conv1 = nn.Conv2d(channels, 6, 5)
        self.conv2 = nn.Conv2d(6, 16, 3 if image_size == 28 else 5)
        self.conv3 = nn.Conv2d(16, 120, 5)
        self.fc1 = nn.Linear(120, 84)
        self.fc2 = nn.Linear(84, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of images ``(batch, channels, image_size, image_size)``."""
        check_images(x, self.conv1.in_channels, self.image_size)
        x = F.max_pool2d(F.relu(self.conv1(x)), 2)
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.relu(self.conv3(x)).flatten(1)
        logits: Tensor = self.fc2(F.relu(self.fc1(x)))
        return logits
