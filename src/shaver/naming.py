"""Names a user passes: an unknown one is answered with the valid ones and the nearest match."""

from collections.abc import Iterable
from difflib import get_close_matches


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
