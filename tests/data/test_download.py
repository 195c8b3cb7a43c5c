"""Downloads against a local server: resumed, checked, atomic, and honest about every failure."""

import hashlib
import io
import sys
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest

from shaver.data import download, load, locate
from shaver.data.download import DownloadError, fetch

CONTENT = np.random.default_rng(0).bytes(500_000)
MD5 = hashlib.md5(CONTENT).hexdigest()
NAME = "file.gz"


@dataclass
class Server:
    """Serves ``files``; each of ``cuts`` breaks off one answer after so many bytes."""

    files: dict[str, bytes]
    cuts: list[int] = field(default_factory=list)
    ranges: bool = True
    asked: list[tuple[str, str | None]] = field(default_factory=list)
    url: str = ""

    def answer(self, handler: BaseHTTPRequestHandler) -> None:
        name, wanted = handler.path.lstrip("/"), handler.headers.get("Range")
        self.asked.append((name, wanted))
        if name not in self.files:
            handler.send_error(404)
            return
        content, start = self.files[name], 0
        if self.ranges and wanted is not None:
            start = int(wanted.removeprefix("bytes=").removesuffix("-"))
            if start >= len(content):
                handler.send_response(416)
                handler.send_header("Content-Range", f"bytes */{len(content)}")
                handler.send_header("Content-Length", "0")
                handler.end_headers()
                return
            handler.send_response(206)
            handler.send_header("Content-Range", f"bytes {start}-{len(content) - 1}/{len(content)}")
        else:
            handler.send_response(200)
        handler.send_header("Content-Length", str(len(content) - start))
        handler.send_header("Content-Encoding", "gzip")  # as some servers say of .gz files: not to be unzipped
        handler.end_headers()
        end = start + self.cuts.pop(0) if self.cuts else len(content)
        handler.wfile.write(content[start:end])
        handler.close_connection = True


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    state = Server({NAME: CONTENT})

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            state.answer(self)

        def log_message(self, *arguments: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    state.url = f"http://127.0.0.1:{http.server_address[1]}/"
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setitem(download.MIRRORS, "mnist", (state.url,))
    yield state
    http.shutdown()
    thread.join()
    http.server_close()


def refused_url() -> str:
    """A port of this machine where nobody listens."""
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{free.getsockname()[1]}/"


def visible(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if not path.name.endswith(".lock"))


def test_a_file_arrives_byte_for_byte_and_is_not_fetched_twice(tmp_path, server, capfd):
    path = fetch("mnist", NAME, MD5, tmp_path / "new" / "folder")
    assert path == tmp_path / "new" / "folder" / NAME
    assert path.read_bytes() == CONTENT
    assert fetch("mnist", NAME, MD5, path.parent) == path
    assert server.asked == [(NAME, None)]
    assert visible(path.parent) == [NAME]
    assert capfd.readouterr() == ("", "")  # not on a terminal: nothing is printed


def test_a_broken_connection_is_resumed_where_it_stopped(tmp_path, server):
    server.cuts = [150_000, 200_000]
    assert fetch("mnist", NAME, MD5, tmp_path).read_bytes() == CONTENT
    assert server.asked == [(NAME, None), (NAME, "bytes=150000-"), (NAME, "bytes=350000-")]
    assert visible(tmp_path) == [NAME]


def test_a_later_call_resumes_what_an_earlier_one_left(tmp_path, server):
    server.cuts = [100_000, 0]  # the second connection brings nothing, so the call gives up
    with pytest.raises(DownloadError, match="100000 bytes are kept, and the next attempt continues there"):
        fetch("mnist", NAME, MD5, tmp_path)
    assert visible(tmp_path) == [f"{NAME}.part"]
    assert fetch("mnist", NAME, MD5, tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == (NAME, "bytes=100000-")


def test_a_connection_that_always_breaks_is_given_up(tmp_path, server, monkeypatch):
    monkeypatch.setattr(download, "ATTEMPTS", 3)
    server.cuts = [10] * 100
    with pytest.raises(DownloadError):
        fetch("mnist", NAME, MD5, tmp_path)
    assert len(server.asked) == 3
    assert (tmp_path / f"{NAME}.part").read_bytes() == CONTENT[:30]


def test_a_server_without_ranges_sends_everything_again(tmp_path, server):
    server.ranges, server.cuts = False, [150_000]
    assert fetch("mnist", NAME, MD5, tmp_path).read_bytes() == CONTENT
    assert len(server.asked) == 2


def test_a_complete_part_is_only_checked(tmp_path, server):
    (tmp_path / f"{NAME}.part").write_bytes(CONTENT)
    assert fetch("mnist", NAME, MD5, tmp_path).read_bytes() == CONTENT
    assert server.asked == [(NAME, "bytes=500000-")]


@pytest.mark.parametrize("stale", [b"of another file", CONTENT + b"too long", bytes(len(CONTENT))])
def test_a_part_of_another_file_is_thrown_away(tmp_path, server, stale):
    (tmp_path / f"{NAME}.part").write_bytes(stale)
    assert fetch("mnist", NAME, MD5, tmp_path).read_bytes() == CONTENT
    assert visible(tmp_path) == [NAME]


@pytest.mark.parametrize("wrong", [CONTENT[:-1], CONTENT[:-1] + b"?", b"<html>sorry</html>"])
def test_another_checksum_is_refused_and_never_kept(tmp_path, server, wrong):
    server.files[NAME] = wrong
    with pytest.raises(DownloadError, match=rf"{server.url}{NAME}: its MD5 is not {MD5}"):
        fetch("mnist", NAME, MD5, tmp_path)
    assert visible(tmp_path) == []


def test_a_damaged_older_file_is_replaced(tmp_path, server):
    (tmp_path / NAME).write_bytes(CONTENT[:99])
    assert fetch("mnist", NAME, MD5, tmp_path).read_bytes() == CONTENT


def test_every_mirror_is_tried_and_every_failure_named(tmp_path, server, monkeypatch):
    refused = refused_url()
    monkeypatch.setitem(download.MIRRORS, "mnist", (refused, server.url + "gone/"))
    with pytest.raises(DownloadError) as caught:
        fetch("mnist", NAME, MD5, tmp_path)
    message = str(caught.value)
    assert f"{refused}{NAME}: " in message
    assert "Connection refused" in message
    assert f"{server.url}gone/{NAME}: 404" in message
    assert visible(tmp_path) == []
    monkeypatch.setitem(download.MIRRORS, "mnist", (refused, server.url + "gone/", server.url))
    assert fetch("mnist", NAME, MD5, tmp_path).read_bytes() == CONTENT


def test_many_at_once_download_once(tmp_path, server):
    results: list[bytes] = []
    threads = [
        threading.Thread(target=lambda: results.append(fetch("mnist", NAME, MD5, tmp_path).read_bytes()))
        for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == [CONTENT] * 4
    assert len(server.asked) == 1


def test_a_terminal_sees_a_progress_bar(tmp_path, server, monkeypatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    fetch("mnist", NAME, MD5, tmp_path)
    assert NAME in terminal.getvalue()


def source() -> locate.DataSource[bytes]:
    layout = locate.Layout("folder", (NAME,), lambda paths: paths[0].read_bytes())
    return locate.DataSource("mnist", (layout,), "folder", ((NAME, MD5),))


def test_what_is_missing_goes_into_the_cache_or_the_given_folder(tmp_path, cache, monkeypatch, server):
    monkeypatch.setitem(download.MIRRORS, "mnist", (server.url,))  # the cache fixture closed the network
    assert source().read(None, download=True) == CONTENT
    assert (cache / "folder" / NAME).exists()
    assert source().read(tmp_path / "mine", download=True) == CONTENT
    assert (tmp_path / "mine" / "folder" / NAME).exists()
    assert len(server.asked) == 2


def test_folders_are_searched_in_order(tmp_path, cache, monkeypatch):
    for name in ("given", "variable", "cache"):
        (tmp_path / name / "folder").mkdir(parents=True)
        (tmp_path / name / "folder" / NAME.removesuffix(".gz")).write_bytes(name.encode())
    monkeypatch.setenv(locate.VARIABLE, str(tmp_path / "variable"))
    assert source().read(tmp_path / "given", download=False) == b"given"
    assert source().read(None, download=False) == b"variable"
    (tmp_path / "variable" / "folder" / "file").unlink()
    assert source().read(None, download=False) == b"cache"
    with pytest.raises(FileNotFoundError):  # an explicit folder is the only one
        source().read(tmp_path / "variable", download=False)


def test_offline_it_says_what_it_searched_for_where_and_what_to_do(tmp_path, cache, monkeypatch):
    monkeypatch.setenv(locate.VARIABLE, str(tmp_path / "nowhere"))
    with pytest.raises(FileNotFoundError) as caught:
        load("mnist")
    message = str(caught.value)
    for part in (
        "the data set 'mnist' was not found",
        "mnist/{train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz",
        "MNIST/raw/{train-images",
        f"{tmp_path / 'nowhere'} (from SHAVER_DATA; no such folder)",
        f"{cache} (the user's cache",
        "http://127.0.0.1:9/train-images-idx3-ubyte.gz: ",
        "Connection refused",
        "What to do: put train-images-idx3-ubyte.gz, ",
        "set SHAVER_DATA or pass root=",
    ):
        assert part in message
    with pytest.raises(FileNotFoundError, match="because download=False"):
        load("cifar10", download=False)


def test_a_wrong_file_from_a_mirror_never_becomes_the_data_set(cache, monkeypatch, server):
    monkeypatch.setitem(download.MIRRORS, "mnist", (server.url,))
    server.files["train-images-idx3-ubyte.gz"] = b"not MNIST"
    with pytest.raises(FileNotFoundError, match="its MD5 is not f68b3c2dcbeaaa9fbdd348bbdeb94873; it was deleted"):
        load("mnist")
    assert visible(cache / "mnist") == []


def test_the_cache_is_the_users(tmp_path, monkeypatch):
    monkeypatch.delenv(locate.VARIABLE, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert locate.search_path() == [(tmp_path / "shaver", "the user's cache")]
