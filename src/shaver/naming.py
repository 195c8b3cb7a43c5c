"""Checks of names and numbers that a user passes. Errors repeat what was passed and say what would work."""

import math
import operator
import os
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
from numbers import Real
from typing import Any


def check_name(kind: str, name: object, valid: Iterable[str]) -> str:
    """Return ``name`` if it is one of ``valid``, else raise a ``ValueError`` that helps.

    Example:
        >>> check_name("criterion", "magnitud", ["magnitude", "random"])
        Traceback (most recent call last):
        ...
        ValueError: unknown criterion 'magnitud'; did you mean 'magnitude'? Valid: 'magnitude', 'random'.
    """
    names = list(valid)
    if isinstance(name, str) and name in names:
        return name
    lower = {valid.lower(): valid for valid in names}
    near = [lower[match] for match in get_close_matches(str(name).lower(), lower, n=1, cutoff=0.5)]
    hint = f" did you mean {near[0]!r}?" if near else ""
    raise ValueError(f"unknown {kind} {name!r};{hint} Valid: {', '.join(map(repr, names))}.".replace("; V", ". V"))


def check_count(name: str, value: object, least: int = 1) -> int:
    """Return ``value`` if it is an integer of at least ``least``, else raise a ``ValueError`` that names it.

    Example:
        >>> check_count("epochs", 1.5)
        Traceback (most recent call last):
        ...
        ValueError: epochs must be an integer of at least 1, not 1.5.
    """
    try:
        number = value if isinstance(value, float) else operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        number = None
    if number is None or isinstance(value, bool) or not least <= number < math.inf or number % 1:
        raise ValueError(f"{name} must be an integer of at least {least}, not {shown(value)}.")
    return int(number)


def check_number(
    name: str, value: object, *, least: float = -math.inf, most: float = math.inf, above: bool = False
) -> float:
    """Return ``value`` if it is finite and from ``least`` (or above it) to ``most``, else raise a ``ValueError``."""
    good = isinstance(value, Real) and not isinstance(value, bool) and math.isfinite(value)
    if not good or value < least or value > most or (above and value == least):  # type: ignore[operator]
        low = "" if least == -math.inf else f" above {least:g}" if above else f" of at least {least:g}"
        bound = low if most == math.inf else f"{low} and at most {most:g}" if above else f" from {least:g} to {most:g}"
        raise ValueError(f"{name} must be a finite number{bound}, not {shown(value)}.")
    return float(value)  # type: ignore[arg-type]


def check_functions(**given: object) -> None:
    """Refuse what is neither a function nor None, by the argument's name.

    Example:
        >>> check_functions(forward="x")
        Traceback (most recent call last):
        ...
        TypeError: forward must be a function, not 'x'.
    """
    for name, value in given.items():
        if value is not None and (not callable(value) or isinstance(value, type)):
            raise TypeError(f"{name} must be a function, not {shown(value)}.")


def check_flags(**given: object) -> None:
    """Refuse what is neither True nor False, by the argument's name."""
    for name, value in given.items():
        if not isinstance(value, bool):
            raise TypeError(f"{name} must be True or False, not {shown(value)}.")


def require(module: str, purpose: str, extra: str) -> Any:
    """Import an optional package, or raise an ``ImportError`` that says what it is for and how to install it."""
    try:
        return import_module(module)
    except ImportError as error:
        package = {"PIL.Image": "pillow", "sklearn.datasets": "scikit-learn"}.get(module, module.partition(".")[0])
        raise ImportError(f'{purpose} needs {package}: pip install "shaver[{extra}]".') from error


def shown(value: object) -> str:
    """A value as text, short enough for a message."""
    text = repr(value)
    return text if len(text) <= 60 and "\n" not in text else f"a {type(value).__name__}"


def import_function(spec: str, option: str) -> Callable[..., Any]:
    """Import the function that ``package.module:function`` names. Modules in the current folder are found too.

    Raises:
        ValueError: The text has another form, or the module has no such function.
        ImportError: The module does not exist.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ValueError(f"{option} must have the form package.module:function, not {spec!r}.")
    sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{option} {spec}: {error}; the current folder and the installed packages were searched."
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    found: Callable[..., Any] = getattr(module, name, None) or getattr(
        module, check_name(f"function of {module_name}", name, [n for n, v in vars(module).items() if callable(v)])
    )
    return found
