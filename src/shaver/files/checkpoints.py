"""Checkpoints: one atomic file per epoch, with everything needed to resume exactly. The last two are kept.

``checkpoint-00007.safetensors`` is the state after epoch 7. A file appears only when it is complete, and an older one
is removed only when two newer ones exist. So a kill or a full disk at any moment leaves a good checkpoint.
"""

import warnings
from pathlib import Path
from typing import Any

from shaver.io import load_state, save_state

_PATTERN = "checkpoint-*.safetensors"
_KEEP = 2
#: The posterior that a finished SpaM run writes into the same folder.
POSTERIOR = "posterior.safetensors"


def save_checkpoint(folder: Path, epoch: int, state: dict[str, Any]) -> Path:
    """Write the state after ``epoch``, then remove all but the last two checkpoints."""
    path = folder / f"checkpoint-{epoch:05d}.safetensors"
    save_state(path, state)
    for old in sorted(folder.glob(_PATTERN))[:-_KEEP]:
        old.unlink(missing_ok=True)
    return path


def load_newest(folder: Path) -> tuple[Path, dict[str, Any]] | None:
    """The newest readable checkpoint of a folder, or ``None`` if it has none."""
    errors = []
    for path in sorted(folder.glob(_PATTERN), reverse=True):
        try:
            state = load_state(path)
        except ValueError as error:
            errors.append(str(error))
            continue
        if errors:
            warnings.warn(f"{' '.join(errors)} The older {path.name} is used instead.", stacklevel=3)
        return path, state
    if errors:
        raise ValueError("no checkpoint can be read: " + " ".join(errors) + " Pass resume=False to start over.")
    return None


def clear(folder: Path, *, checkpoints: bool) -> None:
    """Remove incomplete files of a killed run and, with ``checkpoints``, its checkpoints and posterior."""
    patterns = [".checkpoint-*.part", f".{POSTERIOR}.*.part"]
    if checkpoints:
        patterns += [_PATTERN, POSTERIOR]
    for pattern in patterns:
        for file in folder.glob(pattern):
            file.unlink(missing_ok=True)
