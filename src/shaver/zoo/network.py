"""What every network of the zoo shares: it remembers its arguments and checks its input."""

from torch import Tensor, nn


class Network(nn.Module):
    """A network that can be rebuilt from a plain dict.

    Attributes:
        arguments: The network's name in the zoo and the options of its constructor, JSON-able. They describe the
            network as it was built: removing channels afterwards does not change them.
    """

    def __init__(self, name: str, **options: int | list[int] | str) -> None:
        super().__init__()
        self.arguments: dict[str, object] = {"name": name, **options}


def check_positive(**sizes: int) -> None:
    """Every size is a positive integer, else a ``ValueError`` names it."""
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"{name} must be a positive integer, not {size!r}.")


def check_divides(part_name: str, part: int, whole_name: str, whole: int) -> None:
    """``part`` divides ``whole``, else a ``ValueError`` lists what would."""
    if whole % part:
        fitting = ", ".join(str(n) for n in range(1, whole + 1) if whole % n == 0)
        raise ValueError(f"{part_name}={part} does not divide {whole_name}={whole}; {fitting} would.")


def check_images(x: Tensor, channels: int, size: int | None = None) -> None:
    """Images of shape ``(batch, channels, size, size)`` (None: any size), else a ``ValueError`` shows both shapes."""
    if x.ndim != 4 or x.shape[1] != channels or (size is not None and tuple(x.shape[2:]) != (size, size)):
        height, width = (size, size) if size is not None else ("height", "width")
        raise ValueError(
            f"expected images of shape (batch, {channels}, {height}, {width}), but got {tuple(x.shape)}"
            + ("; x.unsqueeze(1) adds the channel dimension." if x.ndim == 3 and channels == 1 else ".")
        )
