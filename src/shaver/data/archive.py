"""Tar archives read in memory with a limit: nothing is unpacked to the disk, and no archive can fill the memory."""

import tarfile
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

#: Members of an archive; IMDB has 100,000.
_MEMBERS = 400_000


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
