"""The table of rooms on the design page holds for the source, imports inside functions included."""

import ast
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import shaver
from tests.docs.rooms import ROOT, rooms

HOUSE = ROOT / "src" / "shaver"

#: Imports against the order that are still to be moved: ``room: rooms it should not import``. Aim: none.
KNOWN: dict[str, set[str]] = {}


def room_of(name: str) -> str:
    """The room of a public name; a room's name is its own."""
    return shaver._NAMES[name].split(".")[1] if name in shaver._NAMES else name


class Imports(ast.NodeVisitor):
    """The rooms that a file imports from, at its top, in a function or in a method.

    Imports for the type checker alone are left out: they never run, and they let a lower room name, in a signature,
    what a higher one hands it.
    """

    def __init__(self, path: Path) -> None:
        self.rooms: set[str] = set()
        self.visit(ast.parse(path.read_text(encoding="utf-8")))
        self.rooms = {room for room in self.rooms if not room.startswith("__")}  # shaver.__version__

    def visit_If(self, node: ast.If) -> None:
        if ast.unparse(node.test) not in ("TYPE_CHECKING", "typing.TYPE_CHECKING"):
            self.generic_visit(node)

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "imports are absolute"
        if node.module == "shaver":
            self.rooms |= {room_of(alias.name) for alias in node.names}
        elif (node.module or "").startswith("shaver."):
            self.rooms.add(str(node.module).split(".")[1])

    def visit_Import(self, node: ast.Import) -> None:
        self.rooms |= {alias.name.split(".")[1] for alias in node.names if alias.name.startswith("shaver.")}

    def visit_Attribute(self, node: ast.Attribute) -> None:
        """``shaver.fit`` imports its room when it is used."""
        if isinstance(node.value, ast.Name) and node.value.id == "shaver":
            self.rooms.add(room_of(node.attr))
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        """``import_module("shaver.room")``."""
        if ast.unparse(node.func).endswith("import_module") and node.args and isinstance(node.args[0], ast.Constant):
            name = str(node.args[0].value)
            self.rooms |= {name.split(".")[1]} if name.startswith("shaver.") else set()
        self.generic_visit(node)


def graph() -> dict[str, set[str]]:
    """Room → the rooms it imports from."""
    built: dict[str, set[str]] = {}
    for path in HOUSE.rglob("*.py"):
        room = path.relative_to(HOUSE).parts[0].removesuffix(".py")
        if room != "__init__":  # the public face: names of all rooms, imported when they are used
            built.setdefault(room, set()).update(Imports(path).rooms - {room})
    return built


def test_the_design_names_every_room():
    built = {path.stem for path in HOUSE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert {room for row in rooms() for room in row} == built - {"__init__"}


def test_a_room_imports_only_from_those_above_it():
    level = {room: place for place, row in enumerate(rooms()) for room in row}
    found = graph()
    for room in level:  # shown by pytest -s, and when the test fails
        print(f"{room:>14} → {', '.join(sorted(found[room], key=level.get))}")
    wrong = {room: {other for other in found[room] if level[other] > level[room]} for room in found}
    assert {room: others for room, others in wrong.items() if others} == KNOWN


def test_no_rooms_import_each_other_in_a_circle():
    allowed = {room: others - KNOWN.get(room, set()) for room, others in graph().items()}
    try:
        tuple(TopologicalSorter(allowed).static_order())
    except CycleError as error:
        raise AssertionError(f"a circle of imports: {' → '.join(reversed(error.args[1]))}") from error
