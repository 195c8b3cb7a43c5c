"""The real data sets, where SHAVER_DATA has them: their official contents, decoded bit for bit."""

import functools
import hashlib
import os
import shutil
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
import torch

from shaver.data import Splits, download, load, locate

pytestmark = pytest.mark.large_data


@functools.cache
def real(name: str) -> Splits:
    if not os.environ.get(locate.VARIABLE):
        pytest.skip(f"{name}: the environment variable {locate.VARIABLE} is not set")
    try:
        return load(name, download=False)
    except FileNotFoundError:
        pytest.skip(f"{name}: not in {os.environ[locate.VARIABLE]}, where {locate.VARIABLE} points")


def sha256(images: torch.Tensor) -> str:
    return hashlib.sha256(images.permute(0, 2, 3, 1).contiguous().numpy().tobytes()).hexdigest()


@pytest.mark.parametrize(
    ("name", "sizes", "mean", "std"),
    [  # the constants that the literature quotes
        ("mnist", (60000, 10000), [0.1307], [0.3081]),
        ("fashion", (60000, 10000), [0.2860], [0.3530]),
        ("cifar10", (50000, 10000), [0.4914, 0.4822, 0.4465], [0.2470, 0.2435, 0.2616]),
        ("cifar100", (50000, 10000), [0.5071, 0.4865, 0.4409], [0.2673, 0.2564, 0.2762]),
    ],
)
def test_sizes_and_normalisation_are_the_known_ones(name, sizes, mean, std):
    splits = real(name)
    assert (len(splits.train), len(splits.test)) == sizes
    torch.testing.assert_close(splits.train.mean.flatten(), torch.tensor(mean).double(), atol=6e-5, rtol=0)
    torch.testing.assert_close(splits.train.std.flatten(), torch.tensor(std).double(), atol=6e-5, rtol=0)
    assert splits.test.mean is not None
    assert torch.equal(splits.test.mean, splits.train.mean)
    x, _ = splits.train[:5000]
    assert x.mean().abs() < 0.05
    assert (x.std() - 1).abs() < 0.05


@pytest.mark.parametrize("name", ["fashion", "cifar10", "cifar100"])
def test_classes_are_balanced(name):
    splits = real(name)
    for part in (splits.train, splits.test):
        counts = part.targets.bincount(minlength=splits.classes)
        assert counts.tolist() == [len(part) // splits.classes] * splits.classes


def test_mnist_label_counts():
    splits = real("mnist")
    assert splits.train.targets.bincount().tolist() == [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert splits.test.targets.bincount().tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


def test_cifar10_pixels_are_the_official_ones():
    splits = real("cifar10")
    assert sha256(splits.train.inputs) == "47af8b02cfcfb6cdf3dbbd1969ad7f1b70f4413f6f80f437b020ee4e5bc8304a"
    assert sha256(splits.test.inputs) == "f9b1e2130bab680db56eb06d886f7f1ad0f1183907ceff4659d1735c890f5b04"
    assert splits.train.targets[:10].tolist() == [6, 9, 9, 4, 1, 1, 2, 7, 8, 3]
    assert splits.test.targets[:10].tolist() == [3, 8, 8, 0, 6, 6, 1, 6, 3, 1]


def test_imdb_is_whole():
    splits = real("imdb")
    for part, size in ((splits.train, 33_132_823), (splits.test, 32_350_685)):
        assert len(part) == 25000
        assert part.targets.bincount().tolist() == [12500, 12500]
        assert sum(len(text.encode()) for text in part.texts) == size


@pytest.mark.parametrize(("name", "folder"), [("mnist", "mnist"), ("fashion", "fashion_mnist")])
def test_the_official_checksums_accept_the_official_files(tmp_path, monkeypatch, name, folder):
    """The whole way of a first use: nothing on the disk, all four files from a mirror, loaded from the cache."""
    expected = real(name)
    source = Path(os.environ[locate.VARIABLE]) / folder
    if not (source / "train-images-idx3-ubyte.gz").exists():
        pytest.skip(f"{name}: {source} has no gzipped IDX files")
    mirror = tmp_path / "mirror"
    shutil.copytree(source, mirror)

    class Quiet(SimpleHTTPRequestHandler):
        def log_message(self, *arguments: object) -> None:
            pass

    http = ThreadingHTTPServer(("127.0.0.1", 0), functools.partial(Quiet, directory=str(mirror)))
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        monkeypatch.setitem(download.MIRRORS, name, (f"http://127.0.0.1:{http.server_address[1]}/",))
        splits = load(name, root=tmp_path / "cache")
    finally:
        http.shutdown()
        thread.join()
        http.server_close()
    assert torch.equal(splits.train.inputs, expected.train.inputs)
    assert torch.equal(splits.test.targets, expected.test.targets)
