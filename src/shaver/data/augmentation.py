"""Random flips and crops of a whole batch of images, as tensor operations."""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from shaver.naming import check_count


@dataclass(frozen=True)
class FlipCrop:
    """Shift each image by up to ``pad`` pixels in each direction (a crop of the zero-padded image) and mirror half.

    Example:
        >>> data = InMemory(images, labels, augment=FlipCrop(pad=4))

    Attributes:
        pad: Largest shift, in pixels; the width of the border of zeros. 0 does not shift.
        flip: Whether to mirror each image left to right with probability ½. Do not use it for digits or text.
    """

    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        check_count("pad", self.pad, 0)

    def __call__(self, images: Tensor, generator: torch.Generator) -> Tensor:
        """The augmented images. Each image has its own random shift and flip, drawn from ``generator``."""
        if images.ndim != 4:
            raise ValueError(
                f"flips and crops need images of shape (batch, channels, height, width), not {tuple(images.shape)}."
            )
        batch, channels, height, width = images.shape
        shift = torch.randint(0, 2 * self.pad + 1, (2, batch, 1), generator=generator)
        mirrored = torch.rand(batch, 1, generator=generator) < (0.5 if self.flip else 0.0)
        rows = torch.arange(height) + shift[0]
        along = torch.arange(width)
        columns = torch.where(mirrored, along.flip(0), along) + shift[1]
        # One gather over the flattened padded images, with the same pixels for all channels of an image.
        pixels = rows.unsqueeze(2) * (width + 2 * self.pad) + columns.unsqueeze(1)
        index = pixels.reshape(batch, 1, height * width).expand(-1, channels, -1).to(images.device)
        padded = F.pad(images, (self.pad,) * 4)
        return padded.flatten(2).gather(2, index).reshape(images.shape)
