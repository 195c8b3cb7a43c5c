"""A world without data: no SHAVER_DATA, an empty cache, and mirrors that nobody can reach."""

from pathlib import Path

import pytest

from shaver.data import download, locate


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's cache folder, empty; the network is not reachable."""
    folder = tmp_path / "cache"
    monkeypatch.delenv(locate.VARIABLE, raising=False)
    monkeypatch.setattr(locate, "_cache", lambda: folder)
    for name in download.MIRRORS:
        monkeypatch.setitem(download.MIRRORS, name, ("http://127.0.0.1:9/",))
    return folder
