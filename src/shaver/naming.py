"""Names that a user passes: an unknown one is answered with the valid ones and the nearest match."""

import os
import sys
from collections.abc import Callable, Iterable
from difflib import get_close_matches
from importlib import import_module
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


def import_function(spec: str, option: str) -> Callable[..., Any]:
    """The function that ``package.module:function`` names; modules beside the user are found as Python finds them.

    Raises:
        ValueError: It is not written like that, or the module has no such function.
        ImportError: There is no such module.
    """
    module_name, _, name = spec.partition(":")
    if not module_name or not name:
        raise ValueError(f"{option} is written package.module:function, not {spec!r}.")
    sys.path.insert(0, os.getcwd())
    try:
        module = import_module(module_name)
    except ModuleNotFoundError as error:
        raise ImportError(
            f"{option} {spec}: {error}; it is looked for here and among the installed packages."
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    found: Callable[..., Any] = getattr(module, name, None) or getattr(
        module, check_name(f"function of {module_name}", name, [n for n, v in vars(module).items() if callable(v)])
    )
    return found
