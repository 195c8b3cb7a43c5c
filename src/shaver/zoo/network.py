"""The base class of the zoo's networks, stages of residual blocks, and checks of sizes and inputs."""

from collections.abc import Callable, Sequence

from torch import Tensor, nn


class Network(nn.Module):
    """A network that can be rebuilt from a plain dict.

    Args:
        name: The network's name in the zoo.
        sizes: The options of its constructor: positive integers and lists of them.

    Attributes:
        arguments: The name and the options, as JSON values. They describe the network as it was built: removing
            channels later does not change them.
    """

    def __init__(self, name: str, **sizes: int | list[int]) -> None:
        super().__init__()
        self.arguments: dict[str, object] = {"name": name, **sizes}
        for option, size in sizes.items():
            named = {f"{option}[{i}]": one for i, one in enumerate(size)} if isinstance(size, list) else {option: size}
            for place, one in named.items():
                if not isinstance(one, int) or isinstance(one, bool) or one < 1:
                    raise ValueError(f"{place} must be a positive integer, not {one!r}.")

    def input_dropout(self, share: float) -> nn.Dropout:
        """A layer that sets this share of the inputs to zero in training; kept in ``arguments`` unless it is 0."""
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
            raise ValueError(f"dropout is the share of the inputs to drop, in [0, 1), not {share!r}.")
        if share:
            self.arguments["dropout"] = share
        return nn.Dropout(share)


def stages(
    block: Callable[[int, int, int], nn.Module], inputs: int, widths: Sequence[int], count: int
) -> nn.Sequential:
    """Stages of ``count`` blocks each; the first block of each stage but the first halves the resolution.

    ``block`` makes a block from its input channels, output channels and stride.
    """
    blocks: list[nn.Module] = []
    for stage, outputs in enumerate(widths):
        for index in range(count):
            blocks.append(block(inputs, outputs, 2 if stage and not index else 1))
            inputs = outputs
    return nn.Sequential(*blocks)


def check_divides(part_name: str, part: int, whole_name: str, whole: int) -> None:
    """Raise a ``ValueError`` if ``part`` does not divide ``whole``; the message lists values that do."""
    if whole % part:
        fitting = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
        raise ValueError(f"{part_name}={part} does not divide {whole_name}={whole}; use one of {fitting}.")


def check_images(x: Tensor, channels: int, size: int | None = None) -> None:
    """Raise a ``ValueError`` unless the shape is ``(batch, channels, size, size)``; ``size=None`` accepts any size."""
    if x.ndim != 4 or x.shape[1] != channels or (size is not None and tuple(x.shape[2:]) != (size, size)):
        height, width = (size, size) if size is not None else ("height", "width")
        raise ValueError(
            f"expected images of shape (batch, {channels}, {height}, {width}), but got {tuple(x.shape)}"
            + ("; x.unsqueeze(1) adds the channel dimension." if x.ndim == 3 and channels == 1 else ".")
        )
