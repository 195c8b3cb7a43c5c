"""What a result was made with: the version of the code, the packages and the machine."""

import ast
import hashlib
import os
import platform
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import shaver

#: Where the code behind a trained network begins, and that behind the rows of a cell.
_STARTS = {"training": "shaver.lab.run.networks", "cell": "shaver.lab.run.cell"}
_PACKAGES = ("shaver", "torch", "numpy", "scikit-learn", "torch-pruning", "pandas")
#: The syntax nodes that may begin with a docstring.
_DOCUMENTED = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)


@cache
def code_version(of: str = "cell") -> str:
    """A hash of the code that produces a result. Comments and docstrings do not count.

    The code is every module of this package that the module in which the result is made imports, directly or through
    others, also inside functions. Tables, figures and the command line are not among them.
    """
    checksum = hashlib.sha256(shaver.__version__.encode())
    for name, path in sorted(imported_modules(_STARTS[of]).items()):
        checksum.update(name.encode() + _source(path.read_text(encoding="utf-8"))[0])
    return checksum.hexdigest()[:12]


def imported_modules(start: str) -> dict[str, Path]:
    """The modules of this package that a module needs, itself included, with their files."""
    found: dict[str, Path] = {}
    waiting = [start]
    while waiting:
        name = waiting.pop()
        if name in found or (path := _file_of(name)) is None:
            continue
        found[name] = path
        # Python runs the packages around a module first.
        waiting += [name.rpartition(".")[0], *_source(path.read_text(encoding="utf-8"))[1]]
    return found


@cache
def _source(text: str) -> tuple[bytes, tuple[str, ...]]:
    """A digest of a file's syntax tree without docstrings, and the names in it that may be modules.

    Names are gathered from everywhere in the file except what only type checkers read.
    """
    tree = ast.parse(text)
    imports: list[str] = []
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.Import):
            imports += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            imports.append(node.module)
            lazy = vars(shaver)["_NAMES"] if node.module == "shaver" else {}
            imports += [lazy.get(alias.name, f"{node.module}.{alias.name}") for alias in node.names]
        elif isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            waiting += node.orelse
        elif isinstance(node, ast.stmt | ast.Module | ast.ExceptHandler | ast.match_case):
            if isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
                node.body[0] = ast.Pass()
            waiting += [child for child in ast.iter_child_nodes(node) if not isinstance(child, ast.expr)]
    return hashlib.sha256(ast.dump(tree).encode()).digest(), tuple(dict.fromkeys(imports))


def _file_of(module: str) -> Path | None:
    """The file of a module of this package; ``None`` for anything else."""
    package, *parts = module.split(".")
    place = Path(shaver.__file__).parent.joinpath(*parts)
    files = (place / "__init__.py", place.with_suffix(".py"))
    return next((file for file in files if package == "shaver" and file.is_file()), None)


def versions() -> dict[str, str]:
    """Python and the packages that matter, those that are installed."""
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def machine() -> dict[str, Any]:
    """The computer, as far as it matters for times."""
    processor, cores = _processor(), os.cpu_count()
    return {"platform": platform.platform(), "processor": processor, "cores": cores, "host": platform.node()}


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
