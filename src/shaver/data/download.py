"""Downloads from the official mirrors, resumed after an interruption and checked.

A download is written to ``NAME.part`` in the target folder. If the connection breaks, the part is kept, and the next
attempt (in this call or a later one) continues from there. :mod:`pooch` then compares the checksum and renames the
file; a file that does not match is deleted.
"""

import logging
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from shaver.data.extras import require

if TYPE_CHECKING:
    from requests import Response

#: Base URLs of each data set's files, most reliable first. The file's name is appended.
MIRRORS: dict[str, tuple[str, ...]] = {
    "mnist": (
        "https://ossci-datasets.s3.amazonaws.com/mnist/",
        "https://storage.googleapis.com/cvdf-datasets/mnist/",
    ),
    "fashion": (
        "http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        "https://raw.githubusercontent.com/zalandoresearch/fashion-mnist/master/data/fashion/",
    ),
    "cifar10": ("https://www.cs.toronto.edu/~kriz/",),
    "cifar100": ("https://www.cs.toronto.edu/~kriz/",),
    "imdb": ("https://ai.stanford.edu/~amaas/data/sentiment/",),
}

#: Connections per file and mirror. A further one is tried only if the last one brought some bytes.
ATTEMPTS = 5
#: Seconds to wait for a connection and for the next bytes.
TIMEOUT = (10.0, 60.0)
_CHUNK = 1 << 17


class DownloadError(OSError):
    """No mirror delivered the file; the message gives the reason per mirror."""


def fetch(dataset: str, filename: str, md5: str, folder: Path) -> Path:
    """Download one file of a data set into ``folder``, unless it exists already, and return its path.

    Several processes may call this for the same file: one downloads it and the others wait.
    """
    pooch = require("pooch", "downloading data")
    errors = require("requests.exceptions", "downloading data")
    broken = require("urllib3.exceptions", "downloading data")
    folder.mkdir(parents=True, exist_ok=True)
    part = folder / f"{filename}.part"
    reasons = []
    with FileLock(folder / f".{filename}.lock"), _quiet(pooch.get_logger()):
        for base in MIRRORS[dataset]:
            while True:
                resumed = part.exists()
                try:
                    return Path(
                        pooch.retrieve(
                            base + filename,
                            known_hash=f"md5:{md5}",
                            fname=filename,
                            path=folder,
                            downloader=_Resumable(part),
                        )
                    )
                except (errors.RequestException, broken.HTTPError) as error:
                    size = part.stat().st_size if part.exists() else 0
                    kept = f" ({size} bytes are kept, and the next attempt continues there)" if size else ""
                    reasons.append(f"{base + filename}: {_reason(error)}{kept}")
                except ValueError:  # pooch: wrong checksum; the part and the file are deleted
                    if resumed:
                        continue  # the old part may have been wrong: try again from the start
                    reasons.append(f"{base + filename}: its MD5 is not {md5}; it was deleted")
                break
    raise DownloadError(f"{filename} could not be downloaded:\n  " + "\n  ".join(reasons))


class _Resumable:
    """A pooch downloader that continues ``part`` and renames it when it is complete."""

    def __init__(self, part: Path) -> None:
        self.part = part

    def __call__(self, url: str, output_file: str, pooch: object = None, check_only: bool = False) -> None:
        errors = require("requests.exceptions", "downloading data")
        broken = require("urllib3.exceptions", "downloading data")
        with _progress() as progress:
            task = progress.add_task(url.rpartition("/")[2], total=None)
            for attempt in range(1, ATTEMPTS + 1):
                before = self._size()
                try:
                    self._continue(url, progress, task)
                    break
                except (errors.ConnectionError, errors.Timeout, broken.HTTPError):
                    if self._size() <= before or attempt == ATTEMPTS:
                        raise
        os.replace(self.part, output_file)

    def _size(self) -> int:
        return self.part.stat().st_size if self.part.exists() else 0

    def _continue(self, url: str, progress: Progress, task: Any) -> None:
        """Fetch the missing bytes of the part. Raises if the connection ends before the file is complete."""
        requests = require("requests", "downloading data")
        # "identity" keeps a .gz file compressed, so that ranges and sizes are those of the file.
        headers = {"Accept-Encoding": "identity"}
        start = self._size()
        if start:
            headers["Range"] = f"bytes={start}-"
        with requests.get(url, headers=headers, stream=True, timeout=TIMEOUT) as response:
            if start and response.status_code == requests.codes.requested_range_not_satisfiable:
                if response.headers.get("Content-Range") == f"bytes */{start}":
                    return  # the part was complete already
                self.part.unlink()  # it is longer than the file, so it belongs to another file
                return self._continue(url, progress, task)
            response.raise_for_status()
            if not _continues(response, start):
                start = 0  # the server ignores ranges and sends everything
            length = response.headers.get("Content-Length")
            total = start + int(length) if length is not None else None
            progress.update(task, total=total, completed=start)
            with open(self.part, "ab") as file:
                file.truncate(start)
                for block in _blocks(response):
                    file.write(block)
                    progress.advance(task, len(block))
            if total is not None and self._size() < total:
                raise requests.exceptions.ConnectionError(f"the connection broke at {self._size()} of {total} bytes")


def _continues(response: "Response", start: int) -> bool:
    return response.status_code == 206 and response.headers.get("Content-Range", "").startswith(f"bytes {start}-")


def _blocks(response: "Response") -> Iterator[bytes]:
    raw: BinaryIO = response.raw
    while block := raw.read(_CHUNK):  # iter_content would decompress files that some servers mark as compressed
        yield block


def _progress() -> Progress:
    """A progress bar, shown only on a terminal."""
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
        disable=not sys.stderr.isatty(),
    )


@contextmanager
def _quiet(logger: logging.Logger) -> Iterator[None]:
    """Silence pooch's own messages, which the progress bar replaces."""
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def _reason(error: BaseException) -> str:
    """The innermost cause: it says "Connection refused" where the outer errors describe a connection pool."""
    while (cause := error.__cause__ or error.__context__) is not None:
        error = cause
    return str(error) or type(error).__name__
