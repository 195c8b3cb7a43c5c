"""Experiments from settings to files: what is trained, pruned and measured, and how the results are shown."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shaver.study.recipe import Recipe
    from shaver.study.recipes import get_recipe, recipe_names
    from shaver.study.results import load_runs
    from shaver.study.runner import run_study

_NAMES = {
    "Recipe": "shaver.study.recipe",
    "get_recipe": "shaver.study.recipes",
    "load_runs": "shaver.study.results",
    "recipe_names": "shaver.study.recipes",
    "run_study": "shaver.study.runner",
}

__all__ = ["Recipe", "get_recipe", "load_runs", "recipe_names", "run_study"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'shaver.study' has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)
