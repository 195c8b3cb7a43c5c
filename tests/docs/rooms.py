"""The table of modules, here called rooms: read from the design page; ``python -m tests.docs.rooms`` copies it."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
DESIGN, CONTRIBUTING = ROOT / "docs" / "design.md", ROOT / "CONTRIBUTING.md"
TABLE = re.compile(r"^\| module or package \|.*?(?=^$)", re.MULTILINE | re.DOTALL)


def table(page: Path) -> str:
    """The table as it stands on a page."""
    found = TABLE.search(page.read_text(encoding="utf-8"))
    assert found is not None, f"{page.name} has no table of modules"
    return found[0]


def rooms() -> list[list[str]]:
    """The rooms in the table of the design page, row by row."""
    return [re.findall(r"`([a-z]+)/?`", row) for row in re.findall(r"^\| (`.*?) \|", table(DESIGN), re.MULTILINE)]


if __name__ == "__main__":
    text = CONTRIBUTING.read_text(encoding="utf-8")
    CONTRIBUTING.write_text(text.replace(table(CONTRIBUTING), table(DESIGN)), encoding="utf-8")
