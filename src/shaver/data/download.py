"""Downloads from the official mirrors, resumed after an interruption and checked.

A download is written to ``NAME.part`` in the target folder. If the connection breaks, the part is kept, and the next
attempt (in this call or a later one) continues from there. The complete part is renamed if its checksum is right, and
deleted otherwise.
"""

import hashlib
import os
import sys
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

from filelock import FileLock
from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)

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
TIMEOUT = 60.0
_CHUNK = 1 << 17


class DownloadError(OSError):
    """No mirror delivered the file; the message gives the reason per mirror."""


def fetch(dataset: str, filename: str, md5: str, folder: Path) -> Path:
    """Download one file of a data set into ``folder``, unless it exists already, and return its path.

    Several processes may call this for the same file: one downloads it and the others wait.
    """
    folder.mkdir(parents=True, exist_ok=True)
    target, part = folder / filename, folder / f"{filename}.part"
    reasons = []
    with FileLock(folder / f".{filename}.lock"):
        if target.is_file() and _md5(target) == md5:
            return target
        for url in (base + filename for base in MIRRORS[dataset]):
            for resumed in (True, False) if part.exists() else (False,):
                try:
                    _download(url, part)
                except (OSError, HTTPException) as error:
                    size = _size(part)
                    kept = f" ({size} bytes are kept, and the next attempt continues there)" if size else ""
                    reasons.append(f"{url}: {_reason(error)}{kept}")
                    break
                if _md5(part) == md5:
                    os.replace(part, target)
                    return target
                part.unlink()
                if not resumed:  # else the old part may have been wrong: try again from the start
                    reasons.append(f"{url}: its MD5 is not {md5}; it was deleted")
    raise DownloadError(f"{filename} could not be downloaded:\n  " + "\n  ".join(reasons))


def _download(url: str, part: Path) -> None:
    """Complete the part, over several connections if need be; with a progress bar on a terminal."""
    columns = (BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeRemainingColumn())
    console, hidden = Console(stderr=True), not sys.stderr.isatty()
    with Progress(TextColumn("{task.description}"), *columns, console=console, transient=True, disable=hidden) as bar:
        task = bar.add_task(url.rpartition("/")[2], total=None)
        for attempt in range(1, ATTEMPTS + 1):
            before = _size(part)
            try:
                return _continue(url, part, bar, task)
            except (OSError, HTTPException):
                if _size(part) <= before or attempt == ATTEMPTS:
                    raise


def _continue(url: str, part: Path, bar: Progress, task: TaskID) -> None:
    """Fetch the missing bytes of the part. Raises if the connection ends before the file is complete."""
    start = _size(part)
    headers = {"User-Agent": "shaver"} | ({"Range": f"bytes={start}-"} if start else {})
    try:
        response = urlopen(Request(url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        if not start or error.code != 416:
            raise
        if error.headers.get("Content-Range") == f"bytes */{start}":
            return None  # the part was complete already
        part.unlink()  # it is longer than the file, so it belongs to another file
        return _continue(url, part, bar, task)
    with response, open(part, "ab") as file:
        if response.status != 206 or not response.headers.get("Content-Range", "").startswith(f"bytes {start}-"):
            start = 0  # the server ignores ranges and sends everything
        length = response.headers.get("Content-Length")
        total = start + int(length) if length is not None else None
        bar.update(task, total=total, completed=start)
        file.truncate(start)
        while block := response.read(_CHUNK):
            file.write(block)
            bar.advance(task, len(block))
    if total is not None and _size(part) < total:
        raise ConnectionError(f"the connection broke at {_size(part)} of {total} bytes")


def _size(part: Path) -> int:
    return part.stat().st_size if part.exists() else 0


def _md5(path: Path) -> str:
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "md5").hexdigest()


def _reason(error: BaseException) -> str:
    """The cause of an error: "404 Not Found" or "Connection refused" instead of "urlopen error"."""
    if isinstance(error, HTTPError):
        return f"{error.code} {error.reason}"
    return str(getattr(error, "reason", error)) or type(error).__name__
