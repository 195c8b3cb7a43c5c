"""What a run is recognised by: its settings, its network, its data. Another run's checkpoint is refused."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any


def check_same(path: Path, saved: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse to continue a run with another configuration or another network.

    Raises:
        ValueError: With every setting that differs, the checkpoint's value and the one asked for.
    """
    differences = []
    for key in dict.fromkeys([*saved, *asked]):
        ours, theirs = asked.get(key), saved.get(key)
        if ours == theirs:
            continue
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            parts = [k for k in dict.fromkeys([*theirs, *ours]) if ours.get(k) != theirs.get(k)]
            shown = [f"{key}[{k!r}]: {theirs.get(k)!r} there, {ours.get(k)!r} here" for k in parts[:3]]
            differences += shown + ([f"… and {len(parts) - 3} more in {key}"] if len(parts) > 3 else [])
        else:
            differences.append(f"{key}: {theirs!r} there, {ours!r} here")
    if differences:
        raise ValueError(
            f"{path} belongs to another run: {'; '.join(differences)}. "
            "Use another folder, the same settings, or resume=False to start anew."
        )


def describe(value: object) -> Any:
    """A setting as plain values that can be saved and compared: functions and objects by their name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): describe(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [describe(v) for v in value]
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '?')}.{getattr(named, '__qualname__', '?')}"
