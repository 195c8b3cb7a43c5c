"""The table of rooms on the design page holds for the source."""

import ast
import re
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"
HOUSE = DOCS.parent / "src" / "shaver"


def rooms() -> list[list[str]]:
    """The rooms in the table of the design page, row by row."""
    page = (DOCS / "design.md").read_text(encoding="utf-8")
    return [re.findall(r"`([a-z]+)/?`", row) for row in re.findall(r"^\| (`.*?) \|", page, re.MULTILINE)]


def imported(path: Path) -> set[str]:
    """The rooms that a file imports from when it is itself imported."""
    found = set()
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "shaver":
            names = [node.module] if node.module != "shaver" else [f"shaver.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names if alias.name.startswith("shaver.")]
        else:
            continue
        found |= {name.split(".")[1] for name in names}
    return found - {"__version__"}


def test_the_design_names_every_room():
    built = {path.stem for path in HOUSE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert {room for row in rooms() for room in row} == built - {"__init__"}


def test_a_room_imports_only_from_those_above_it():
    level = {room: place for place, row in enumerate(rooms()) for room in row}
    wrong = [
        f"{path.relative_to(HOUSE)} imports {other}"
        for path in HOUSE.rglob("*.py")
        if (room := path.relative_to(HOUSE).parts[0].removesuffix(".py")) != "__init__"
        for other in imported(path)
        if level[other] > level[room]
    ]
    assert not wrong, wrong
