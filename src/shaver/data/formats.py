"""The formats of data files: IDX (MNIST), and tar archives that are read in memory with a limit.

Nothing is unpacked to the disk, and neither a damaged header nor an archive can fill the memory.
"""

import gzip
import math
import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, cast

import numpy as np
from numpy.typing import NDArray

#: The third byte of the magic number, for unsigned bytes; these data sets use no other type.
_UNSIGNED_BYTE = 0x08
#: Largest number of values in a file, so that a damaged header cannot fill the memory.
_LIMIT = 2**31
#: Members of an archive; IMDB has 100,000.
_MEMBERS = 400_000


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


def read_members(path: Path, wanted: Callable[[str], bool], *, largest: int, total: int) -> Iterator[tuple[str, bytes]]:
    """The name and content of every wanted file of a tar archive."""
    seen = size = 0
    try:
        with tarfile.open(path, "r:*") as archive:
            for member in archive:
                seen, size = seen + 1, size + member.size
                if size > total or seen > _MEMBERS:
                    raise _Refused(f"it holds more than {total} bytes or {_MEMBERS} files, which the real one does not")
                if not wanted(member.name):
                    continue
                if not member.isreg():
                    kind = "a link" if member.issym() or member.islnk() else "no ordinary file"
                    raise _Refused(f"{member.name} is {kind}, which is not followed")
                if member.size > largest:
                    raise _Refused(f"{member.name} has {member.size} bytes, more than the {largest} it may have")
                file = archive.extractfile(member)
                assert file is not None
                yield member.name, file.read()
    except _Refused as error:
        raise ValueError(f"{path} is not the archive it should be: {error}. Delete it and get it again.") from error
    except (tarfile.TarError, EOFError, OSError, zlib.error) as error:
        raise ValueError(f"{path} is truncated or damaged ({error}); delete it and get it again.") from error


class _Refused(Exception):
    """The archive is readable, and shaver does not want to read it."""
