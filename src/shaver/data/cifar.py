"""CIFAR-10 and CIFAR-100: the official Python batches, and lossless WebP sheets.

The official batches are pickles, which can run any code when loaded. :func:`read_batch` runs none of it: the functions
and classes that a pickle names are replaced by stand-ins that only record the arguments.
"""

import io
import pickle
import zipfile
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
from numpy.typing import NDArray

from shaver.data.formats import read_members
from shaver.naming import require

Bytes = NDArray[np.uint8]
_SIDE, _CHANNELS = 32, 3
_PIXELS = _CHANNELS * _SIDE * _SIDE
#: Most bytes of one file of an archive; CIFAR-100's training batch has 155 million.
_BATCH = 2**28


class _Recorded:
    """Stands in for a numpy array or dtype while a batch is read. It only keeps its arguments and state."""

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.state: object = None

    def __setstate__(self, state: object) -> None:
        self.state = state


def _encode(text: object, encoding: object) -> bytes:
    """Python 3 writes bytes in old protocols as ``_codecs.encode(text, "latin1")``."""
    if not isinstance(text, str) or encoding not in ("latin1", b"latin1"):
        raise pickle.UnpicklingError(f"_codecs.encode with {encoding!r} is not allowed")
    return text.encode("latin1")


#: What a batch needs: the parts of a numpy array, under their names in old and new versions of numpy.
_ARRAY = ("numpy.core.multiarray._reconstruct", "numpy._core.multiarray._reconstruct", "numpy.ndarray", "numpy.dtype")


class _BatchReader(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        if (module, name) == ("_codecs", "encode"):
            # A new function each time, because a pickle can set its attributes; the next file must not see them.
            return lambda *arguments: _encode(*arguments)
        if f"{module}.{name}" not in _ARRAY:
            raise pickle.UnpicklingError(f"it asks for {module}.{name}, which a CIFAR batch has no need of")
        return _Recorded

    def persistent_load(self, pid: object) -> NoReturn:
        raise pickle.UnpicklingError("it asks for an outside object")


def read_batch(content: bytes, source: str, labels: str) -> tuple[Bytes, Bytes]:
    """The images ``(n, 3, 32, 32)`` and labels of one official batch. No code from the pickle is run."""
    try:
        batch = _BatchReader(io.BytesIO(content), encoding="bytes").load()
        if not isinstance(batch, dict):
            raise ValueError(f"it holds a {type(batch).__name__} instead of a dict")
        entries = {key.decode("latin1") if isinstance(key, bytes) else key: value for key, value in batch.items()}
        images = _array(entries["data"])
        numbers = entries[labels]
        if not isinstance(numbers, list) or not all(type(n) is int and 0 <= n < 256 for n in numbers):
            raise ValueError(f"its {labels!r} are not a list of small integers")
        if len(numbers) != len(images):
            raise ValueError(f"it has {len(images)} images but {len(numbers)} labels")
    except KeyError as error:
        raise ValueError(f"{source} is not a CIFAR batch: it has no entry {error}.") from error
    except Exception as error:  # a damaged pickle can raise any error
        raise ValueError(f"{source} is damaged or not a CIFAR batch ({error}); delete it and get it again.") from error
    return images, np.asarray(numbers, np.uint8)


def _array(recorded: object) -> Bytes:
    """The numpy array of a recorded one: ``state`` is (version, shape, dtype, column-major?, bytes)."""
    state = recorded.state if isinstance(recorded, _Recorded) else None
    if not isinstance(state, tuple) or len(state) != 5:
        raise ValueError("its 'data' is not a numpy array")
    _, shape, dtype, column_major, content = state
    kind = dtype.arguments[0] if isinstance(dtype, _Recorded) and dtype.arguments else None
    if kind not in (b"u1", "u1") or not isinstance(content, bytes) or column_major:
        raise ValueError("its 'data' are not plain unsigned bytes in row order")
    if not isinstance(shape, tuple) or len(shape) != 2 or shape[1] != _PIXELS or len(content) != shape[0] * _PIXELS:
        raise ValueError(f"its 'data' have shape {shape} and {len(content)} bytes instead of (images, {_PIXELS})")
    return np.frombuffer(bytearray(content), np.uint8).reshape(-1, _CHANNELS, _SIDE, _SIDE)


def read_batches(paths: Sequence[Path], labels: str) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """Official batch files, the test batch last, as train images, train labels, test images, test labels."""
    return _join([read_batch(path.read_bytes(), str(path), labels) for path in paths])


def read_archive(path: Path, members: Sequence[str], labels: str) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """The same from the official ``.tar.gz``. Nothing is unpacked to the disk."""
    contents = dict(read_members(path, members.__contains__, largest=_BATCH, total=8 * _BATCH))
    missing = [name for name in members if name not in contents]
    if missing:
        raise ValueError(f"{path} lacks {', '.join(missing)}; it is truncated or another archive.")
    return _join([read_batch(contents[name], f"{path}:{name}", labels) for name in members])


def read_sheets(paths: Sequence[Path]) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    """WebP sheets of 32×32 tiles. The last two paths are the test sheet and ``labels.npz``."""
    *sheets, numbers = paths
    images = [_read_sheet(path) for path in sheets]
    try:
        with np.load(numbers, allow_pickle=False) as archive:
            train_labels, test_labels = archive["train_labels"], archive["test_labels"]
    except (ValueError, KeyError, EOFError, OSError, zipfile.BadZipFile, zlib.error) as error:
        raise ValueError(f"{numbers} is damaged or has no train_labels and test_labels ({error}).") from error
    train_images, test_images = np.concatenate(images[:-1]), images[-1]
    for split, labels, tiles in (("train", train_labels, train_images), ("test", test_labels, test_images)):
        if labels.dtype != np.uint8 or labels.shape != (len(tiles),):
            raise ValueError(
                f"{numbers} has {split}_labels of type {labels.dtype} and shape {labels.shape}, but the sheets hold "
                f"{len(tiles)} {split} images, which need {len(tiles)} labels of type uint8."
            )
    return train_images, train_labels, test_images, test_labels


def _read_sheet(path: Path) -> Bytes:
    image = require("PIL.Image", f"reading {path.name}", "data")
    try:
        with image.open(path, formats=["WEBP"]) as opened:
            sheet = np.asarray(opened.convert("RGB"))
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{path} is truncated, damaged or not a WebP image ({error}).") from error
    height, width, _ = sheet.shape
    if height % _SIDE or width % _SIDE:
        raise ValueError(f"{path} has {width}×{height} pixels, which are not whole tiles of {_SIDE}×{_SIDE}.")
    tiles = sheet.reshape(height // _SIDE, _SIDE, width // _SIDE, _SIDE, _CHANNELS)
    return np.ascontiguousarray(tiles.transpose(0, 2, 4, 1, 3)).reshape(-1, _CHANNELS, _SIDE, _SIDE)


def _join(batches: Iterable[tuple[Bytes, Bytes]]) -> tuple[Bytes, Bytes, Bytes, Bytes]:
    *train, (test_images, test_labels) = batches
    images, labels = (np.concatenate(parts) for parts in zip(*train, strict=True))
    return images, labels, test_images, test_labels
