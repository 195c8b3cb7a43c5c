"""A model card: what the network is, its results in a table, its figures, and how to load it."""

import json
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shaver.io import write_text

README = "README.md"
FIGURES = "figures"


@dataclass(frozen=True)
class Card:
    """The parts of a model card; :meth:`write` writes it, with its figures, into a hub folder.

    Example:
        >>> card = Card("LeNet, 98 % sparse", rows=[{"sparsity": 0.98, "accuracy": 0.989}], figures=["curve.svg"])
        >>> card.write("folder")

    Attributes:
        title: The heading.
        summary: One paragraph: the training data and how the network was pruned.
        rows: The results, one dict per row. A value that a row lacks stays empty.
        figures: SVG or PNG files; they are copied.
        training: Facts about the run, such as epochs, learning rate, prior and seconds.
        usage: Code that loads the network. Default: :func:`shaver.load` with a factory.
        license: An SPDX name such as ``"apache-2.0"``. Default: the card names none.
        base_model: Hub name of the network that was fine-tuned.
        datasets: Hub names of the data.
        tags: Further tags.
    """

    title: str
    summary: str = ""
    rows: Sequence[Mapping[str, Any]] = ()
    figures: Sequence[str | Path] = ()
    training: Mapping[str, Any] = field(default_factory=dict)
    usage: str | None = None
    license: str | None = None
    base_model: str | None = None
    datasets: Sequence[str] = ()
    tags: Sequence[str] = ()

    def text(self) -> str:
        """The card in Markdown, with the hub's metadata at the top."""
        parts = [self._metadata(), f"# {self.title}", *([self.summary] if self.summary else [])]
        if self.rows:
            parts += ["## Results", markdown_table(self.rows)]
        parts += [f"![{Path(figure).stem}]({FIGURES}/{Path(figure).name})" for figure in self.figures]
        if self.training:
            facts = [{"setting": name, "value": value} for name, value in self.training.items()]
            parts += ["## Training", markdown_table(facts)]
        parts += ["## Use", f"```python\n{(self.usage or _USAGE).strip()}\n```"]
        return "\n\n".join(parts) + "\n"

    def write(self, folder: str | Path) -> Path:
        """Write ``README.md`` and copy the figures into the same folder."""
        target = Path(folder)
        for figure in self.figures:
            if not Path(figure).is_file():
                raise FileNotFoundError(f"the card's figure {str(figure)!r} does not exist.")
        for figure in self.figures:
            (target / FIGURES).mkdir(parents=True, exist_ok=True)
            shutil.copyfile(figure, target / FIGURES / Path(figure).name)
        write_text(target / README, self.text())
        return target / README

    def _metadata(self) -> str:
        """The metadata in YAML; strings and lists in JSON are valid YAML."""
        entries = {
            "library_name": "shaver",
            "license": self.license,
            "base_model": self.base_model,
            "datasets": list(self.datasets),
            "tags": ["shaver", "pruning", *self.tags],
        }
        lines = [f"{name}: {json.dumps(value, ensure_ascii=False)}" for name, value in entries.items() if value]
        return "\n".join(["---", *lines, "---"])


_USAGE = """
import shaver

model = shaver.load("this folder", factory=...)   # the constructor of the original network
"""


def markdown_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Rows as a Markdown table, with numbers to four digits."""
    columns = list(dict.fromkeys(name for row in rows for name in row))
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += ["| " + " | ".join(_words(row.get(name, "")) for name in columns) + " |" for row in rows]
    return "\n".join(lines)


def _words(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}"
    return str(value).replace("|", "\\|").replace("\n", " ")
