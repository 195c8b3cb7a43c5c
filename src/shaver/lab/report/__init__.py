"""The report of runs: one data frame of results, tables, figures and the page."""

from typing import Literal, get_args

Format = Literal["terminal", "markdown", "csv", "latex", "svg", "png", "html"]
FORMATS: tuple[Format, ...] = get_args(Format)
