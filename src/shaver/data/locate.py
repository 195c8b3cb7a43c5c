"""Finding data files: in an explicit folder, the folder in ``SHAVER_DATA``, the user's cache, or on a mirror."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Generic, TypeVar

from shaver.data import download as downloads

#: The environment variable that names the folder of data sets.
VARIABLE = "SHAVER_DATA"

Content = TypeVar("Content")


@dataclass(frozen=True)
class Layout(Generic[Content]):
    """One way in which a data set is stored on the disk."""

    folder: str  # its folder, relative to the data folder
    files: tuple[str, ...]  # file names that must all exist in it; x.gz may also be x
    # A function from the paths of files to their content; raises ValueError for damaged files
    read: Callable[[Sequence[Path]], Content]

    def find(self, root: Path) -> list[Path] | None:
        """The paths of all files, or ``None`` if one is missing."""
        paths = []
        for name in self.files:
            choices = [root / self.folder / name, root / self.folder / name.removesuffix(".gz")]
            path = next((choice for choice in choices if choice.exists()), None)
            if path is None:
                return None
            paths.append(path)
        return paths


@dataclass(frozen=True)
class DataSource(Generic[Content]):
    """The layouts of a data set, and the files to download."""

    name: str  # the data set's name, also in :data:`shaver.data.download.MIRRORS`
    layouts: tuple[Layout[Content], ...]  # tried in this order in each folder
    folder: str  # for downloaded files, relative to the data folder
    remote: tuple[tuple[str, str], ...]  # file names and their official MD5

    def read(self, root: str | os.PathLike[str] | None, download: bool) -> Content:
        """Read the data set from the first folder that has it; download it if none has.

        Raises:
            FileNotFoundError: It was not found; the message lists files, folders and what to do.
            ValueError: Its files are damaged.
        """
        folders = search_path(root)
        found = self._read_from(folders)
        failure: OSError | None = None
        if found is None and download:
            target, _ = folders[-1]
            try:
                for filename, md5 in self.remote:
                    downloads.fetch(self.name, filename, md5, target / self.folder)
            except OSError as error:
                failure = error
            else:
                found = self._read_from(folders[-1:])
        if found is None:
            raise FileNotFoundError(self._not_found(folders, failure)) from failure
        return found

    def _read_from(self, folders: Sequence[tuple[Path, str]]) -> Content | None:
        for (folder, _), layout in product(folders, self.layouts):
            if (paths := layout.find(folder)) is not None:
                return layout.read(paths)
        return None

    def _not_found(self, folders: Sequence[tuple[Path, str]], failure: BaseException | None) -> str:
        wanted = [
            f"  {layout.folder + '/' if layout.folder else ''}{{{', '.join(layout.files)}}}" for layout in self.layouts
        ]
        searched = [
            f"  {folder.absolute()} ({why}{'' if folder.is_dir() else '; no such folder'})" for folder, why in folders
        ]
        names = ", ".join(name for name, _ in self.remote)
        return "\n".join(
            [
                f"the data set {self.name!r} was not found. Searched for one of",
                *wanted,
                "in",
                *searched,
                f"{failure}" if failure is not None else "It was not downloaded, because download=False.",
                f"What to do: put {names} (from {downloads.MIRRORS[self.name][0]}) into the subfolder {self.folder} of "
                f"one of these folders; or set {VARIABLE} or pass root= to a folder that has them; or load it once "
                "with a network connection.",
            ]
        )


def search_path(root: str | os.PathLike[str] | None = None) -> list[tuple[Path, str]]:
    """The folders to search, each with the reason: only ``root`` if given, else SHAVER_DATA and the cache.

    A missing data set is downloaded into the last one.
    """
    if root is not None:
        return [(Path(root).expanduser(), "given as root")]
    variable = os.environ.get(VARIABLE)
    folders = [(Path(variable).expanduser(), f"from {VARIABLE}")] if variable else []
    return [*folders, (_cache(), "the user's cache")]


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "shaver"
