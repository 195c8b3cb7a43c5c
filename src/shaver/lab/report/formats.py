"""What ``shaver report`` can make; light, as the command line reads it before anything else."""

from typing import Literal, get_args

Format = Literal["terminal", "markdown", "csv", "latex", "svg", "png", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)
