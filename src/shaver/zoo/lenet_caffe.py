"""LeNet-5 as Caffe has it, the network of the published compression records."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.zoo.network import Network, check_images, check_positive


class LeNetCaffe(Network):
    """Two 5×5 convolutions with max-pooling and two linear layers: 20-50-500-10 with 431,080 parameters.

    The convolutions are followed by max-pooling and a ReLU, as in the published code of sparse variational dropout and
    of L0 regularisation. In Caffe's own example only the hidden linear layer has a ReLU: ``rectified=False``.

    Args:
        classes: Number of outputs.
        widths: Channels of the two convolutions and units of the hidden layer.
        rectified: Whether the convolutions have a ReLU.
    """

    def __init__(self, classes: int = 10, widths: tuple[int, int, int] = (20, 50, 500), rectified: bool = True) -> None:
        check_positive(classes=classes, **{f"widths[{i}]": width for i, width in enumerate(widths)})
        if len(widths) != 3:
            raise ValueError(f"LeNet-5-Caffe has two convolutions and one hidden layer, not widths={widths!r}.")
        super().__init__("lenet_caffe", classes=classes, widths=list(widths), rectified=rectified)
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
        x = self.conv1(x)
        if x.requires_grad:
            x.register_hook(Tensor.contiguous)  # type: ignore[no-untyped-call]
        x = self.activation(F.max_pool2d(x.contiguous(memory_format=torch.channels_last), 2))
        x = self.activation(F.max_pool2d(self.conv2(x), 2))
        logits: Tensor = self.fc2(F.relu(self.fc1(x.flatten(1))))
        return logits
