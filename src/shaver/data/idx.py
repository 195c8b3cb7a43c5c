"""IDX files, the format of MNIST and FashionMNIST: a magic number, the sizes, and the bytes; gzipped or plain."""

import gzip
import math
import zlib
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

#: The third byte of the magic number, for unsigned bytes; these data sets use no other type.
_UNSIGNED_BYTE = 0x08
#: Largest number of values in a file, so that a damaged header cannot fill the memory.
_LIMIT = 2**31


def read_idx(path: Path, *, dimensions: int) -> NDArray[np.uint8]:
    """Read one IDX file of unsigned bytes with the given number of ``dimensions``."""
    try:
        with open(path, "rb") as plain:
            zipped = plain.read(2) == b"\x1f\x8b"
        with cast(BinaryIO, gzip.open(path, "rb") if zipped else open(path, "rb")) as file:
            return _parse(file, dimensions)
    except (EOFError, gzip.BadGzipFile, zlib.error, ValueError) as error:
        raise ValueError(
            f"{path} is truncated, damaged or not an IDX file ({error}); delete it and get it again."
        ) from error


def _parse(file: BinaryIO, dimensions: int) -> NDArray[np.uint8]:
    magic = file.read(4)
    expected = bytes([0, 0, _UNSIGNED_BYTE, dimensions])
    if magic != expected:
        raise ValueError(f"it starts with {magic.hex() or 'nothing'} instead of {expected.hex()}")
    header = file.read(4 * dimensions)
    if len(header) != 4 * dimensions:
        raise ValueError("its header is incomplete")
    shape = tuple(int.from_bytes(header[4 * k : 4 * k + 4], "big") for k in range(dimensions))
    count = math.prod(shape)
    if count > _LIMIT:
        raise ValueError(f"its header declares {count} values, more than {_LIMIT}")
    content = bytearray(file.read(count + 1))  # one more than expected, to detect extra bytes
    if len(content) != count:
        amount = "more" if len(content) > count else f"{len(content)}"
        raise ValueError(f"its header declares {count} values of shape {shape}, but it holds {amount}")
    return np.frombuffer(content, np.uint8).reshape(shape)
