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


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    """The local servers of these tests are reached directly, whatever proxy the machine uses."""
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("no_proxy", "127.0.0.1")
