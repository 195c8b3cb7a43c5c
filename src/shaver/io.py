"""Files: tensors as safetensors, everything else as JSON, written atomically, never unpickled.

A file appears under its name only when it is complete: it is written beside it, flushed to the disk, and renamed.
"""

import json
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load as _parse
from safetensors.torch import save as _serialise
from torch import Tensor


@contextmanager
def atomic_path(path: str | os.PathLike[str]) -> Iterator[Path]:
    """Give a temporary path in the same folder; rename it to ``path`` when the block ends without an error.

    On an error (a full disk, an interrupt) the temporary file is removed and an older ``path`` stays as it was.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(prefix=f".{target.name}.", suffix=".part", dir=target.parent)
    os.close(handle)
    temporary = Path(name)
    try:
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file atomically."""
    write_bytes(path, text.encode())


def write_json(path: str | os.PathLike[str], value: object) -> None:
    """Write JSON atomically. NaN and infinity are refused: other readers cannot parse them."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read JSON; a damaged file is named."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}); it is damaged or of another kind.") from error


def save_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors as one safetensors file, atomically. ``metadata`` is a flat map of strings."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_bytes(path, _serialise(plain, dict(metadata) if metadata else None))


def load_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a safetensors file; a damaged or foreign file is named."""
    content = Path(path).read_bytes()
    try:
        return _parse(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} is not a readable safetensors file ({error}); it is damaged or of another kind."
        ) from error


def pack(state: object) -> tuple[dict[str, Tensor], object]:
    """Split a nested state (dicts, lists, tuples, numbers, strings, tensors) into tensors and a JSON value.

    Every tensor is replaced by ``{"$tensor": key}``; :func:`unpack` puts it back. This is how checkpoints hold an
    optimizer's state without pickle. Dict keys that are not strings (optimizer state has integers) are kept.
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: object, path: str) -> object:
        if isinstance(value, Tensor):
            key = f"{len(tensors)}:{path}"  # the number keeps {"a.b": …} and {"a": {"b": …}} apart
            tensors[key] = value
            return {"$tensor": key}
        if isinstance(value, Mapping):
            return {"$dict": [[k, walk(v, f"{path}.{k}" if path else str(k))] for k, v in value.items()]}
        if isinstance(value, tuple):
            return {"$tuple": [walk(v, f"{path}.{i}") for i, v in enumerate(value)]}
        if isinstance(value, list):
            return [walk(v, f"{path}.{i}") for i, v in enumerate(value)]
        if value is None or isinstance(value, bool | int | str):
            return value
        if isinstance(value, float):
            return {"$float": value.hex()}  # exact, and infinity has a name
        raise TypeError(f"{path or 'the state'} holds a {type(value).__name__}, which cannot be saved without pickle.")

    return tensors, walk(state, "")


def unpack(tensors: Mapping[str, Tensor], value: object) -> Any:
    """Undo :func:`pack`."""
    if isinstance(value, list):
        return [unpack(tensors, v) for v in value]
    if isinstance(value, dict):
        ((tag, content),) = value.items()
        decode: dict[str, Callable[[], object]] = {
            "$tensor": lambda: tensors[content],
            "$dict": lambda: {k: unpack(tensors, v) for k, v in content},
            "$tuple": lambda: tuple(unpack(tensors, v) for v in content),
            "$float": lambda: float.fromhex(content),
        }
        return decode[tag]()
    return value


def save_state(path: str | os.PathLike[str], state: object) -> None:
    """Write any nested state as one safetensors file: its tensors, and the rest as JSON in the header. Atomic."""
    tensors, rest = pack(state)
    save_tensors(path, tensors, {"state": json.dumps(rest)})


def load_state(path: str | os.PathLike[str]) -> Any:
    """Read what :func:`save_state` wrote; nothing is executed or unpickled."""
    tensors = load_tensors(path)
    content = Path(path).read_bytes()
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    if "state" not in metadata:
        raise ValueError(f"{path} is a safetensors file without a saved state; it was written by something else.")
    return unpack(tensors, json.loads(metadata["state"]))


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
