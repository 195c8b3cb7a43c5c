"""Small convolutional networks: LeNet-5, LeNet-5 as Caffe has it, and one for the 8×8 digits."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.zoo.network import Network, check_images


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


class LeNetCaffe(Network):
    """Two 5×5 convolutions with max-pooling and two linear layers: 20-50-500-10 with 431,080 parameters.

    This is the network of the published compression records. The convolutions are followed by max-pooling and a ReLU,
    as in the published code of sparse variational dropout and of L0 regularisation. In Caffe's own example only the
    hidden linear layer has a ReLU: ``rectified=False``.

    Args:
        classes: Number of outputs.
        widths: Channels of the two convolutions and units of the hidden layer.
        rectified: Whether the convolutions have a ReLU.
        dropout: Share of the pixels that are set to zero at random while the network trains.
    """

    def __init__(
        self,
        classes: int = 10,
        widths: tuple[int, int, int] = (20, 50, 500),
        rectified: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__("lenet_caffe", classes=classes, widths=list(widths))
        self.dropout = self.input_dropout(dropout)
        if len(widths) != 3:
            raise ValueError(f"LeNet-5-Caffe has two convolutions and one hidden layer, not widths={widths!r}.")
        self.arguments["rectified"] = rectified
        self.activation = nn.ReLU() if rectified else nn.Identity()
        first, second, hidden = widths
        self.conv1 = nn.Conv2d(1, first, 5)
        self.conv2 = nn.Conv2d(first, second, 5)
        self.fc1 = nn.Linear(second * 16, hidden)
        self.fc2 = nn.Linear(hidden, classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits ``(batch, classes)`` of images ``(batch, 1, 28, 28)``."""
        check_images(x, self.conv1.in_channels, 28)
        # Channels last halve the time of an epoch on a CPU: pooling is then vectorised. Only the backward pass of the
        # first convolution, with its single input channel, is twice as fast with channels first.
        x = self.conv1(self.dropout(x))
        if x.requires_grad:
            x.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        x = self.activation(F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2))
        x = self.activation(F.max_pool2d(self.conv2(x), 2))
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits


class DigitsCNN(Network):
    """Convolutions 16-32-32 (3×3, padded), max-pooling to 4×4 and 2×2, linear 64, classes: 22,954 parameters.

    Args:
        channels: Colour channels of the 8×8 input.
        classes: Number of outputs.
    """

    def __init__(self, channels: int = 1, classes: int = 10) -> None:
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
