"""The lab: experiments from settings to files: what is trained, pruned and measured, and how the results are shown."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from shaver.lab.recipes.catalogue import get_recipe, recipe_names
    from shaver.lab.recipes.recipe import Recipe
    from shaver.lab.report.frame import load_runs
    from shaver.lab.run.runner import run_study

_NAMES = {
    "Recipe": "shaver.lab.recipes.recipe",
    "get_recipe": "shaver.lab.recipes.catalogue",
    "load_runs": "shaver.lab.report.frame",
    "recipe_names": "shaver.lab.recipes.catalogue",
    "run_study": "shaver.lab.run.runner",
}

__all__ = ["Recipe", "get_recipe", "load_runs", "recipe_names", "run_study"]


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module 'shaver.lab' has no attribute {name!r}")
    return getattr(import_module(_NAMES[name]), name)
