"""Checkpoints: one atomic file an epoch, the last two kept, everything a run needs to go on bit by bit.

``checkpoint-00007.safetensors`` is the state after epoch 7. The file appears complete or not at all, and the one
before it is removed only when two newer ones exist, so a kill or a full disk at any moment leaves a good one.
"""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from shaver.io import load_state, save_state

_PATTERN = "checkpoint-*.safetensors"
_KEEP = 2
#: What a finished SpaM run leaves beside its checkpoints.
POSTERIOR = "posterior.safetensors"


def save_checkpoint(folder: Path, epoch: int, state: dict[str, Any]) -> Path:
    """Write the state after ``epoch``, then remove what is older than the one before."""
    path = folder / f"checkpoint-{epoch:05d}.safetensors"
    save_state(path, state)
    for old in sorted(folder.glob(_PATTERN))[:-_KEEP]:
        old.unlink(missing_ok=True)
    return path


def load_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest readable checkpoint of a folder, or ``None`` if it has none.

    Raises:
        ValueError: There are checkpoints and none can be read.
    """
    errors = []
    for path in sorted(folder.glob(_PATTERN), reverse=True):
        try:
            state = load_state(path)
        except (ValueError, KeyError) as error:
            errors.append(str(error))
            continue
        return path, state
    if errors:
        raise ValueError("no checkpoint can be read: " + " ".join(errors) + " Pass resume=False to start anew.")
    return None


def clear(folder: Path, *, checkpoints: bool) -> None:
    """Remove half-written files of a killed run and, if asked, its checkpoints and posterior."""
    for pattern in (".checkpoint-*.part", f".{POSTERIOR}.*.part"):
        for leftover in folder.glob(pattern):
            leftover.unlink(missing_ok=True)
    if checkpoints:
        for old in folder.glob(_PATTERN):
            old.unlink(missing_ok=True)
        (folder / POSTERIOR).unlink(missing_ok=True)


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


def random_state() -> dict[str, Any]:
    """The state of every global generator a training loop may draw from: torch, CUDA, numpy, Python."""
    version, words, gauss = random.getstate()
    mersenne: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, cached = mersenne
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": {"keys": torch.tensor(keys.tolist()), "rest": [int(position), int(has_gauss), float(cached)]},
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Put every global generator back to what :func:`random_state` gave."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    numpy, python = state["numpy"], state["python"]
    np.random.set_state(("MT19937", np.array(numpy["keys"].tolist(), dtype=np.uint32), *numpy["rest"]))
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Run a block under its own seed; the user's random numbers afterwards are as if it had not run."""
    before = random_state()
    try:
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield
    finally:
        set_random_state(before)
