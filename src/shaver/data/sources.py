"""The files of each data set: their names, folders, formats, and official checksums."""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from shaver.data import cifar, imdb
from shaver.data.formats import read_idx
from shaver.data.locate import DataSource, Layout

#: Train inputs, train labels, test inputs, test labels.
Arrays = tuple[NDArray[np.generic], NDArray[np.generic], NDArray[np.generic], NDArray[np.generic]]


def _read_mnist(paths: Sequence[Path]) -> Arrays:
    images, labels, test_images, test_labels = (read_idx(p, dimensions=3 - 2 * (i % 2)) for i, p in enumerate(paths))
    return images[:, None], labels, test_images[:, None], test_labels


def _mnist_source(name: str, folders: Sequence[str], md5s: Sequence[str]) -> DataSource[Arrays]:
    files = tuple(f"{part}-{kind}-ubyte.gz" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))
    layouts = tuple(Layout(folder, files, _read_mnist) for folder in folders)
    return DataSource(name, layouts, folders[0], tuple(zip(files, md5s, strict=True)))


def _cifar_source(
    name: str, unpacked: str, archive: str, md5: str, batches: tuple[str, ...], labels: str
) -> DataSource[Arrays]:
    members = tuple(f"{unpacked}/{batch}" for batch in batches)
    sheets = (*(f"{batch}.webp" for batch in batches), "labels.npz")
    plain: Callable[[Sequence[Path]], Arrays] = partial(cifar.read_batches, labels=labels)
    layouts: list[Layout[Arrays]] = []
    for folder in (name, ""):  # also accept an archive unpacked into the data folder itself
        layouts.append(Layout(folder, members, plain))
        layouts.append(Layout(folder, (archive,), lambda paths: cifar.read_archive(paths[0], members, labels)))
    layouts.insert(1, Layout(name, sheets, cifar.read_sheets))
    return DataSource(name, tuple(layouts), name, ((archive, md5),))


MNIST = _mnist_source(
    "mnist",
    ("mnist", "MNIST/raw"),
    (
        "f68b3c2dcbeaaa9fbdd348bbdeb94873",
        "d53e105ee54ea40749a09fcbcd1e9432",
        "9fb629c4189551a2d022fa330f9573f3",
        "ec29112dd5afa0611ce80d1b7f02629c",
    ),
)
FASHION = _mnist_source(
    "fashion",
    ("fashion_mnist", "FashionMNIST/raw"),
    (
        "8d4fb7e6c68d591d4c3dfef9ec88bf0d",
        "25c81989df183df01b3e8a0aad5dffbe",
        "bef4ecab320f06d8554ea6380940ec79",
        "bb300cfdad3c16e7a12a480ee83cd310",
    ),
)
CIFAR10 = _cifar_source(
    "cifar10",
    "cifar-10-batches-py",
    "cifar-10-python.tar.gz",
    "c58f30108f718f92721af3b95e74349a",
    (*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"),
    "labels",
)
CIFAR100 = _cifar_source(
    "cifar100",
    "cifar-100-python",
    "cifar-100-python.tar.gz",
    "eb9058c3a382ffc7106e4002c42a8d85",
    ("train", "test"),
    "fine_labels",
)
_REVIEWS = tuple(f"aclImdb/{part}/{sentiment}" for part in ("train", "test") for sentiment in ("neg", "pos"))
IMDB: DataSource[tuple[imdb.Reviews, imdb.Reviews]] = DataSource(
    "imdb",
    (
        Layout("imdb", ("train.parquet", "test.parquet"), imdb.read_parquet),
        *(Layout(folder, _REVIEWS, imdb.read_folder) for folder in ("imdb", "")),
        *(Layout(folder, ("aclImdb_v1.tar.gz",), lambda paths: imdb.read_archive(paths[0])) for folder in ("imdb", "")),
    ),
    "imdb",
    (("aclImdb_v1.tar.gz", "7c2ac02c03563afcf9b574c7e56c153a"),),
)
