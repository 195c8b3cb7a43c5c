"""Reading and writing files: tensors as safetensors, everything else as JSON. Writes are atomic; nothing is unpickled.

A file appears under its name only when it is complete: it is written to a temporary file in the same folder, flushed to
the disk, and renamed.
"""

import csv
import errno
import hashlib
import json
import os
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import StringIO
from pathlib import Path
from typing import Any

import torch
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
    check_folder(target.parent)
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f".{target.name}.{secrets.token_hex(4)}.part")
    try:
        temporary.touch(exist_ok=False)
        yield temporary
        with open(temporary, "rb") as file:
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, OSError) and error.errno is not None:  # "No space left on device" does not name the file
            raise OSError(error.errno, f"{os.strerror(error.errno)} (the file was not written)", str(target)) from error
        raise


def as_path(path: object) -> Path:
    """A path from a string or path, else a ``TypeError`` that says what was given."""
    if not isinstance(path, str | os.PathLike):
        raise TypeError(f"a file or folder is given by its path, not by {path!r}.")
    return Path(path)


def check_folder(folder: str | os.PathLike[str]) -> Path:
    """Return a folder that exists or can be created.

    Raises:
        NotADirectoryError: The folder, or one of its parents, is a file.
    """
    place = as_path(folder)
    for part in (place, *place.parents):
        if part.exists() and not part.is_dir():
            raise NotADirectoryError(errno.ENOTDIR, "this is a file, but a folder is needed", str(part))
    return place


def write_bytes(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file atomically."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(content)


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Write a UTF-8 file atomically."""
    write_bytes(path, text.encode())


def write_csv(path: str | os.PathLike[str], rows: Sequence[Mapping[str, object]]) -> None:
    """Write rows as CSV with one header line, atomically. The columns are those of all rows."""
    text = StringIO()
    writer = csv.DictWriter(text, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_text(path, text.getvalue())


def write_json(path: str | os.PathLike[str], value: object) -> None:
    """Write JSON atomically. NaN and infinity are refused: other readers cannot parse them."""
    write_text(path, json.dumps(value, indent=2, allow_nan=False) + "\n")


def read_json(path: str | os.PathLike[str]) -> Any:
    """Read JSON; the error for a damaged file names it."""
    try:
        return json.loads(Path(path).read_text(encoding="utf-8"))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read; shaver writes no such file.") from error
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}); it is damaged or another kind of file.") from error


def save_tensors(
    path: str | os.PathLike[str], tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None
) -> None:
    """Write named tensors as one safetensors file, atomically. ``metadata`` is a flat map of strings."""
    plain = {name: tensor.detach().cpu().contiguous().clone() for name, tensor in tensors.items()}
    write_bytes(path, _serialise(plain, dict(metadata) if metadata else None))


def load_tensors(path: str | os.PathLike[str]) -> dict[str, Tensor]:
    """Read a safetensors file; the error for a damaged or other file names it."""
    return _parsed(path, Path(path).read_bytes())


def _parsed(path: str | os.PathLike[str], content: bytes) -> dict[str, Tensor]:
    try:
        return _parse(content)
    except (SafetensorError, ValueError, KeyError) as error:
        raise ValueError(
            f"{path} is not a readable safetensors file ({error}); it is damaged or another kind of file."
        ) from error


def pack(state: object) -> tuple[dict[str, Tensor], object]:
    """Split a nested state (dicts, lists, tuples, numbers, strings, tensors) into tensors and a JSON value.

    Every tensor is replaced by ``{"$tensor": key}``; :func:`unpack` restores it. Checkpoints use this to hold an
    optimizer's state without pickle. Dict keys may be integers, as in an optimizer's state.
    """
    tensors: dict[str, Tensor] = {}

    def walk(value: object, path: str) -> object:
        if isinstance(value, Tensor):
            key = f"{len(tensors)}:{path}"  # the number distinguishes {"a.b": …} from {"a": {"b": …}}
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
            return {"$float": value.hex()}  # exact, and works for infinity and NaN
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


def digest(tensors: Mapping[str, Tensor], text: str = "") -> str:
    """A checksum of tensors (names, types, shapes and contents) and a text."""
    checksum = hashlib.sha256(text.encode())
    for name in sorted(tensors):
        tensor = tensors[name].detach().cpu().contiguous()
        checksum.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        checksum.update(tensor.reshape(-1).view(torch.uint8).numpy().data)
    return checksum.hexdigest()


def save_state(path: str | os.PathLike[str], state: object) -> None:
    """Write any nested state atomically as one safetensors file: its tensors, and the rest as JSON in the header.

    The header has a checksum of both, so that a damaged file is refused and never read as different values.
    """
    tensors, rest = pack(state)
    text = json.dumps(rest)
    save_tensors(path, tensors, {"state": text, "sha256": digest(tensors, text)})


def load_state(path: str | os.PathLike[str], *, missing: object = ...) -> Any:
    """Read what :func:`save_state` wrote; nothing is executed or unpickled.

    Args:
        path: The file.
        missing: Returned for a safetensors file without a saved state. Default: such a file is an error.

    Raises:
        ValueError: The file is damaged, or another program wrote it.
    """
    content = Path(path).read_bytes()
    tensors = _parsed(path, content)
    size = int.from_bytes(content[:8], "little")
    metadata = json.loads(content[8 : 8 + size]).get("__metadata__", {})
    if "state" not in metadata:
        if missing is not ...:
            return missing
        raise ValueError(f"{path} is a safetensors file without a saved state; another program wrote it.")
    if metadata.get("sha256") != digest(tensors, metadata["state"]):
        raise ValueError(f"{path} is damaged: its contents do not match its checksum.")
    try:
        return unpack(tensors, json.loads(metadata["state"]))
    except RecursionError as error:
        raise ValueError(f"{path} is nested too deeply to be read; shaver writes no such file.") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(f"{path} holds a state that cannot be read ({error!r}); another program wrote it.") from error
