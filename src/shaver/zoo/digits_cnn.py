"""A small convolutional network for the 8×8 digits."""

import torch.nn.functional as F
from torch import Tensor, nn

from shaver.zoo.network import Network, check_images, check_positive


class DigitsCNN(Network):
    """Convolutions 16-32-32 (3×3, padded), max-pooling to 4×4 and 2×2, linear 64, classes: 22,954 parameters.

    Args:
        channels: Colour channels of the 8×8 input.
        classes: Number of outputs.
    """

    def __init__(self, channels: int = 1, classes: int = 10) -> None:
        check_positive(channels=channels, classes=classes)
        super().__init__("digits_cnn", channels=channels, classes=classes)
        self.conv1 = nn.Conv2d(channels, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.conv3 = nn.Conv2d(32, 32, 3, padding=1)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of images ``(batch, channels, 8, 8)``."""
        check_images(x, self.conv1.in_channels, 8)
        x = F.relu(self.conv1(x))
        x = F.max_pool2d(F.relu(self.conv2(x)), 2)
        x = F.max_pool2d(F.relu(self.conv3(x)), 2).flatten(1)
        logits: Tensor = self.fc2(F.relu(self.fc1(x)))
        return logits
