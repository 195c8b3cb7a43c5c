"""Packages that only some data sets need. They are imported on first use."""

import importlib
from typing import Any


def require(module: str, purpose: str) -> Any:
    """Import ``module``, or raise an ``ImportError`` that says what it is for and how to install it."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = {"PIL.Image": "pillow", "sklearn.datasets": "scikit-learn"}.get(module, module.partition(".")[0])
        raise ImportError(f"{purpose} needs {package}; install it with: pip install 'shaver[data]'") from error
