"""What a result was made with: the version of the code, the packages, and the machine."""

import ast
import hashlib
import os
import platform
from functools import cache, lru_cache
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import shaver

#: What the numbers come from. Tables, figures, the command line and integrations do not change a result.
_TRAINING = (
    *("batches.py", "curvature", "data", "evidence", "likelihoods.py", "priors.py", "settings.py", "spam.py"),
    *("stepping.py", "lab/recipes/language.py", "lab/run/store.py", "training", "zoo"),
)
_PRUNING = (*_TRAINING, "criteria", "measure", "pruning", "lab/run/cutting.py", "lab/run/evaluation.py")
_STRUCTURE = (*_PRUNING, "structure")
_PACKAGES = ("shaver", "torch", "numpy", "scikit-learn", "torch-pruning", "pandas")


@lru_cache(maxsize=4)
def code_version(of: str = "posthoc") -> str:
    """Twelve letters that change when the code behind a result does: comments and docstrings do not count.

    Args:
        of: ``"training"``, or the name of a stage.
    """
    rooms = {"training": _TRAINING, "structured": _STRUCTURE}.get(of, _PRUNING)
    checksum = hashlib.sha256(shaver.__version__.encode())
    root = Path(shaver.__file__).parent
    for room in sorted(rooms):
        place = root / room
        for path in sorted(place.rglob("*.py")) if place.is_dir() else [place] if place.exists() else []:
            checksum.update(path.relative_to(root).as_posix().encode())
            checksum.update(_meaning(path))
    return checksum.hexdigest()[:12]


@cache
def _meaning(path: Path) -> bytes:
    """A digest of what a file does; once a process, which has imported the file once."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return hashlib.sha256(ast.dump(_without_docstrings(tree)).encode()).digest()


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
    return {
        "platform": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "host": platform.node(),
    }


def _processor() -> str:
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def _without_docstrings(tree: ast.Module) -> ast.Module:
    for node in ast.walk(tree):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or not node.body:
            continue
        first = node.body[0]
        if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
            node.body[0] = ast.Pass()
    return tree
