"""IDX, CIFAR and IMDB files in every layout; damaged, foreign and hostile ones are refused by name."""

import gzip
import io
import os
import pickle
import struct
import tarfile
from pathlib import Path

import numpy as np
import pytest
import torch

from shaver.data import cifar, formats, imdb, load
from shaver.data.formats import read_idx

RNG = np.random.default_rng(0)
TRAIN, TEST = 12, 5


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + struct.pack(f">{array.ndim}I", *array.shape) + array.tobytes()


def mnist_arrays(side: int = 28) -> dict[str, np.ndarray]:
    return {
        "train-images-idx3-ubyte": RNG.integers(0, 256, (TRAIN, side, side), np.uint8),
        "train-labels-idx1-ubyte": (np.arange(TRAIN) % 10).astype(np.uint8),
        "t10k-images-idx3-ubyte": RNG.integers(0, 256, (TEST, side, side), np.uint8),
        "t10k-labels-idx1-ubyte": np.arange(TEST, dtype=np.uint8),
    }


def write_mnist(folder: Path, arrays: dict[str, np.ndarray], zipped: bool = True) -> None:
    folder.mkdir(parents=True)
    for name, array in arrays.items():
        content = idx_bytes(array)
        (folder / (name + ".gz" * zipped)).write_bytes(gzip.compress(content) if zipped else content)


def python2_batch(images: np.ndarray, labels: list[int], key: str = "labels") -> bytes:
    """A CIFAR batch with the opcodes of Python 2's protocol 2, as in the official files."""

    def text(value: bytes) -> bytes:
        return b"U" + bytes([len(value)]) + value

    number = struct.Struct("<i")
    array = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\x00\x85" + text(b"b") + b"\x87R"
    kind = b"cnumpy\ndtype\n" + text(b"u1") + b"K\x00K\x01\x87R(K\x03" + text(b"|") + b"NNN" + 2 * b"J\xff\xff\xff\xff"
    shape = b"J" + number.pack(len(images)) + b"J" + number.pack(images[0].size) + b"\x86"
    raw = b"T" + number.pack(images.nbytes) + images.tobytes()
    array += b"(K\x01" + shape + kind + b"K\x00tb\x89" + raw + b"tb"
    items = b"](" + b"".join(b"K" + bytes([n]) for n in labels) + b"e"
    return b"\x80\x02}(" + text(b"data") + array + text(key.encode()) + items + b"u."


def cifar_batches(key: str, names: list[str]) -> tuple[dict[str, bytes], dict[str, tuple[np.ndarray, list[int]]]]:
    contents = {name: (RNG.integers(0, 256, (4, 3072), np.uint8), [1, 0, 9, k]) for k, name in enumerate(names)}
    return {name: python2_batch(images, labels, key) for name, (images, labels) in contents.items()}, contents


CIFAR = {
    "cifar10": ("cifar-10-batches-py", "labels", [*(f"data_batch_{k}" for k in range(1, 6)), "test_batch"]),
    "cifar100": ("cifar-100-python", "fine_labels", ["train", "test"]),
}


def pixels(data) -> np.ndarray:
    return data.inputs.numpy()


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize(
    ("name", "folder"),
    [("mnist", "mnist"), ("mnist", "MNIST/raw"), ("fashion", "fashion_mnist"), ("fashion", "FashionMNIST/raw")],
)
def test_idx_files_are_read_from_every_layout(tmp_path, name, folder, zipped):
    arrays = mnist_arrays()
    write_mnist(tmp_path / folder, arrays, zipped)
    splits = load(name, root=tmp_path, download=False)
    assert np.array_equal(pixels(splits.train)[:, 0], arrays["train-images-idx3-ubyte"])
    assert np.array_equal(splits.test.targets.numpy(), arrays["t10k-labels-idx1-ubyte"])
    assert splits.input_shape == splits.train.input_shape == (1, 28, 28)
    scaled = arrays["train-images-idx3-ubyte"] / 255
    x, _ = splits.test[:]
    np.testing.assert_allclose(
        x.numpy()[:, 0], (arrays["t10k-images-idx3-ubyte"] / 255 - scaled.mean()) / scaled.std(), atol=1e-5
    )


IMAGES = mnist_arrays()["train-images-idx3-ubyte"]
WHOLE = idx_bytes(IMAGES)
DAMAGED_IDX = {
    "truncated gzip": (gzip.compress(WHOLE)[:-900], "ended before"),
    "gzip with a flipped bit": (gzip.compress(WHOLE)[:-8] + b"\0\0\0\0" + gzip.compress(WHOLE)[-4:], "CRC"),
    "truncated": (WHOLE[:-1], f"declares {IMAGES.size} values .* holds {IMAGES.size - 1}"),
    "too long": (WHOLE + b"\0", "holds more"),
    "header cut": (WHOLE[:9], "header is incomplete"),
    "empty": (b"", "starts with nothing"),
    "a web page": (b"<html>not found</html>", "starts with 3c68746d"),
    "labels": (idx_bytes(np.zeros(3, np.uint8)), "starts with 00000801 instead of 00000803"),
    "absurd sizes": (bytes([0, 0, 8, 3]) + b"\xff" * 12, "header declares"),
}


@pytest.mark.parametrize("case", DAMAGED_IDX)
def test_a_damaged_idx_file_is_refused_by_name(tmp_path, case):
    content, message = DAMAGED_IDX[case]
    path = tmp_path / "some-images.gz"
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message) as caught:
        read_idx(path, dimensions=3)
    assert str(path) in str(caught.value)


def test_wrong_contents_of_sound_idx_files_are_named(tmp_path):
    write_mnist(tmp_path / "a/mnist", mnist_arrays(side=27))
    with pytest.raises(ValueError, match=r"'mnist' has inputs of shape \(1, 28, 28\).*\(1, 27, 27\)"):
        load("mnist", root=tmp_path / "a")
    write_mnist(tmp_path / "b/mnist", mnist_arrays() | {"t10k-labels-idx1-ubyte": np.full(TEST, 10, np.uint8)})
    with pytest.raises(ValueError, match=r"'mnist'.*label 10 of sample 0 is out of range"):
        load("mnist", root=tmp_path / "b")
    write_mnist(tmp_path / "c/mnist", mnist_arrays() | {"train-labels-idx1-ubyte": np.zeros(3, np.uint8)})
    with pytest.raises(ValueError, match=f"{TRAIN} inputs but 3 targets"):
        load("mnist", root=tmp_path / "c")
    write_mnist(tmp_path / "d/mnist", mnist_arrays() | {"t10k-images-idx3-ubyte": np.zeros((0, 28, 28), np.uint8)})
    with pytest.raises(ValueError, match="empty"):
        load("mnist", root=tmp_path / "d")


def test_the_hand_made_python_2_batch_is_a_true_pickle():
    images = RNG.integers(0, 256, (4, 3072), np.uint8)
    batch = pickle.loads(python2_batch(images, [3, 1, 4, 1]), encoding="bytes")
    assert np.array_equal(batch[b"data"], images)
    assert batch[b"labels"] == [3, 1, 4, 1]


@pytest.mark.parametrize("place", ["unpacked", "unpacked below", "archive", "archive below"])
@pytest.mark.parametrize("name", CIFAR)
def test_official_cifar_files_are_read_from_every_layout(tmp_path, name, place):
    folder, key, names = CIFAR[name]
    files, contents = cifar_batches(key, names)
    target = tmp_path / name if "below" in place else tmp_path
    target.mkdir(exist_ok=True)
    if "unpacked" in place:
        (target / folder).mkdir()
        for batch, content in files.items():
            (target / folder / batch).write_bytes(content)
    else:
        archive_name = folder.replace("-batches-py", "-python") + ".tar.gz"
        with tarfile.open(target / archive_name, "w:gz") as archive:
            for batch, content in files.items():
                entry = tarfile.TarInfo(f"{folder}/{batch}")
                entry.size = len(content)
                archive.addfile(entry, io.BytesIO(content))
    splits = load(name, root=tmp_path, download=False)
    expected = np.concatenate([contents[batch][0] for batch in names[:-1]])
    assert np.array_equal(pixels(splits.train).reshape(-1, 3072), expected)
    assert splits.train.targets.tolist() == [n for batch in names[:-1] for n in contents[batch][1]]
    assert np.array_equal(pixels(splits.test).reshape(-1, 3072), contents[names[-1]][0])
    assert splits.classes == {"cifar10": 10, "cifar100": 100}[name]


@pytest.mark.parametrize("protocol", [2, 3, 4])
def test_batches_written_by_python_3_are_read_too(protocol):
    images = RNG.integers(0, 256, (3, 3072), np.uint8)
    content = pickle.dumps({"data": images, "labels": [1, 2, 3]}, protocol=protocol)
    read, labels = cifar.read_batch(content, "a batch", "labels")
    assert np.array_equal(read.reshape(3, 3072), images)
    assert labels.tolist() == [1, 2, 3]


class Call:
    """Pickles as a call of any function."""

    def __init__(self, function: object, *arguments: object) -> None:
        self.call = (function, arguments)

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("protocol", [0, 2, 4])
@pytest.mark.parametrize(
    ("function", "arguments", "named"),
    [
        (os.mkdir, ("{marker}",), r"\.mkdir"),
        (eval, ("__import__('os').mkdir({marker!r})",), r"\.eval"),
        (getattr, ("", "join"), r"\.getattr"),
        (np.load, ("{marker}",), r"numpy\.load"),
    ],
)
def test_a_hostile_pickle_is_refused_and_runs_nothing(tmp_path, function, arguments, named, protocol):
    marker = str(tmp_path / "ran")
    call = Call(function, *(argument.format(marker=marker) for argument in arguments))
    content = pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": [call]}, protocol=protocol)
    with pytest.raises(ValueError, match=rf"evil is damaged or not a CIFAR batch \(it asks for .*{named},"):
        cifar.read_batch(content, "evil", "labels")
    assert not os.path.exists(marker)


def test_a_pickle_cannot_change_the_reader_itself():
    """BUILD on a function sets its attributes: that must not outlive the file."""
    content = b"\x80\x02c_codecs\nencode\nN}X\x0c\0\0\0__defaults__)s\x86b."
    before = cifar._encode.__defaults__
    with pytest.raises(ValueError, match="not a CIFAR batch"):
        cifar.read_batch(content, "evil", "labels")
    assert cifar._encode.__defaults__ == before


BATCH = python2_batch(np.zeros((2, 3072), np.uint8), [0, 1])
BAD_BATCHES = {
    "truncated": (BATCH[:-40], "damaged"),
    "empty": (b"", "damaged"),
    "a web page": (b"<html>", "damaged"),
    "another dict": (pickle.dumps({"x": 1}, 2), "no entry 'data'"),
    "a list": (pickle.dumps([1], 2), "a list instead of a dict"),
    "other labels": (python2_batch(np.zeros((2, 3072), np.uint8), [0, 1], "coarse"), "no entry 'labels'"),
    "too few labels": (python2_batch(np.zeros((2, 3072), np.uint8), [0]), "2 images but 1 labels"),
    "wrong size": (python2_batch(np.zeros((2, 784), np.uint8), [0, 1]), r"shape \(2, 784\)"),
    "floats": (pickle.dumps({"data": np.zeros((2, 3072)), "labels": [0, 1]}, 2), "unsigned bytes"),
    "no array": (pickle.dumps({"data": b"xx", "labels": [0, 1]}, 2), "not a numpy array"),
    "text labels": (pickle.dumps({"data": np.zeros((1, 3072), np.uint8), "labels": ["a"]}, 2), "small integers"),
    "outside object": (b"\x80\x02K\x01Q.", "outside object"),
}


@pytest.mark.parametrize("case", BAD_BATCHES)
def test_a_bad_cifar_batch_is_refused_by_name(case):
    content, message = BAD_BATCHES[case]
    with pytest.raises(ValueError, match=message) as caught:
        cifar.read_batch(content, "batch-7", "labels")
    assert "batch-7" in str(caught.value)


def test_a_bad_cifar_archive_is_refused_by_name(tmp_path):
    files, _ = cifar_batches("fine_labels", ["train", "test"])
    path = tmp_path / "cifar-100-python.tar.gz"
    with tarfile.open(path, "w:gz") as archive:
        entry = tarfile.TarInfo("cifar-100-python/train")
        entry.size = len(files["train"])
        archive.addfile(entry, io.BytesIO(files["train"]))
    with pytest.raises(ValueError, match="lacks cifar-100-python/test"):
        load("cifar100", root=tmp_path)
    path.write_bytes(path.read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"cifar-100-python\.tar\.gz is truncated or damaged"):
        load("cifar100", root=tmp_path)
    path.write_bytes(b"nonsense" * 100)
    with pytest.raises(ValueError, match=r"cifar-100-python\.tar\.gz is truncated or damaged"):
        load("cifar100", root=tmp_path)


def write_sheets(folder: Path, labels: dict[str, np.ndarray] | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Sheets of 2×3 random tiles for CIFAR-10; returns train and test images, channels last."""
    from PIL import Image

    folder.mkdir()
    tiles = RNG.integers(0, 256, (6, 6, 32, 32, 3), np.uint8)
    for name, batch in zip(CIFAR["cifar10"][2], tiles, strict=True):
        rows = [np.concatenate(list(batch[r * 3 : r * 3 + 3]), axis=1) for r in range(2)]
        Image.fromarray(np.concatenate(rows)).save(folder / f"{name}.webp", lossless=True)
    numbers = {"train_labels": np.arange(30, dtype=np.uint8) % 10, "test_labels": np.arange(6, dtype=np.uint8)}
    np.savez(folder / "labels.npz", **(numbers | (labels or {})))
    return tiles[:5].reshape(-1, 32, 32, 3), tiles[5]


def test_webp_sheets_are_cut_into_tiles_row_by_row(tmp_path):
    train, test = write_sheets(tmp_path / "cifar10")
    splits = load("cifar10", root=tmp_path, download=False)
    assert np.array_equal(pixels(splits.train).transpose(0, 2, 3, 1), train)
    assert np.array_equal(pixels(splits.test).transpose(0, 2, 3, 1), test)
    assert splits.train.targets.tolist() == [n % 10 for n in range(30)]
    x, _ = splits.train[:]
    assert x.mean((0, 2, 3)).abs().max() < 1e-5
    torch.testing.assert_close(x.std((0, 2, 3), correction=0), torch.ones(3))


def test_bad_sheets_and_labels_are_refused_by_name(tmp_path):
    from PIL import Image

    folder = tmp_path / "cifar10"
    write_sheets(folder, {"test_labels": np.arange(5, dtype=np.uint8)})
    with pytest.raises(ValueError, match=r"labels\.npz has test_labels .* shape \(5,\).*6 test images"):
        load("cifar10", root=tmp_path)
    np.savez(folder / "labels.npz", train_labels=np.zeros(30, np.uint8))
    with pytest.raises(ValueError, match=r"labels\.npz is damaged or has no"):
        load("cifar10", root=tmp_path)
    np.savez(folder / "labels.npz", train_labels=np.array([Call(os.getcwd)] * 30), test_labels=np.zeros(6, np.uint8))
    with pytest.raises(ValueError, match=r"labels\.npz is damaged.*allow_pickle"):
        load("cifar10", root=tmp_path)
    (folder / "labels.npz").write_bytes(b"PK\x03\x04 and no more")
    with pytest.raises(ValueError, match=r"labels\.npz is damaged"):
        load("cifar10", root=tmp_path)
    sheet = folder / "data_batch_2.webp"
    Image.fromarray(np.zeros((64, 40, 3), np.uint8)).save(sheet, lossless=True)
    with pytest.raises(ValueError, match=r"data_batch_2\.webp has 40×64 pixels"):
        load("cifar10", root=tmp_path)
    sheet.write_bytes((folder / "data_batch_1.webp").read_bytes()[:3000])
    with pytest.raises(ValueError, match=r"data_batch_2\.webp is truncated, damaged"):
        load("cifar10", root=tmp_path)


REVIEWS = {
    "train": [("neg", 2, 1, "dull"), ("neg", 10, 4, "worse"), ("pos", 0, 9, "fine <br /> film"), ("pos", 3, 7, "été")],
    "test": [("neg", 0, 2, "no"), ("pos", 1, 10, "yes")],
}


def write_reviews(folder: Path) -> None:
    for split, rows in REVIEWS.items():
        for sentiment, number, rating, text in rows:
            path = folder / "aclImdb" / split / sentiment / f"{number}_{rating}.txt"
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
    unlabelled = folder / "aclImdb" / "train" / "unsup" / "0_0.txt"
    unlabelled.parent.mkdir()
    unlabelled.write_text("not to be read")


@pytest.mark.parametrize("form", ["folder", "archive", "parquet"])
def test_reviews_are_the_same_in_every_form(tmp_path, form):
    source = tmp_path / "source"
    write_reviews(source)
    root = tmp_path / "data"
    (root / "imdb").mkdir(parents=True)
    if form == "folder":
        (source / "aclImdb").rename(root / "imdb" / "aclImdb")
    elif form == "archive":
        with tarfile.open(root / "imdb" / "aclImdb_v1.tar.gz", "w:gz") as archive:
            archive.add(source / "aclImdb", "aclImdb")
    else:
        import pyarrow as pa
        import pyarrow.parquet as pq

        for split, rows in REVIEWS.items():
            rows = rows[::-1]
            columns = {
                "text": [row[3] for row in rows],
                "label": [int(row[0] == "pos") for row in rows],
                "review_id": [row[1] for row in rows],
            }
            pq.write_table(pa.table(columns), root / "imdb" / f"{split}.parquet")
    splits = load("imdb", root=root, download=False)
    assert splits.train.texts == ["dull", "worse", "fine <br /> film", "été"]
    assert splits.train.targets.tolist() == [0, 0, 1, 1]
    assert splits.test.texts == ["no", "yes"]
    assert (splits.valid, splits.classes, len(splits.test)) == (None, 2, 2)
    held = load("imdb", root=root, valid_fraction=0.5, seed=1)
    assert held.valid is not None
    assert sorted(held.train.texts + held.valid.texts) == sorted(splits.train.texts)
    labels = dict(zip(splits.train.texts, splits.train.targets.tolist(), strict=True))
    assert held.valid.targets.tolist() == [labels[text] for text in held.valid.texts]


def test_bad_reviews_are_refused_by_name(tmp_path):
    import pyarrow as pa
    import pyarrow.parquet as pq

    write_reviews(tmp_path / "a")
    (tmp_path / "a/aclImdb/test/pos/1_10.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(ValueError, match=r"test/pos/1_10\.txt .* not UTF-8"):
        load("imdb", root=tmp_path / "a")
    (tmp_path / "a/aclImdb/test/pos/1_10.txt").unlink()
    with pytest.raises(ValueError, match="no reviews under test/pos"):
        load("imdb", root=tmp_path / "a")
    folder = tmp_path / "b/imdb"
    folder.mkdir(parents=True)
    good = pa.table({"text": ["a", "b"], "label": [0, 1]})
    pq.write_table(good, folder / "train.parquet")
    for bad, message in (
        (pa.table({"text": ["a"], "label": [2]}), "label 2"),
        (pa.table({"text": ["a", "b"], "label": [0, None]}), "label None"),
        (pa.table({"text": [None, "b"], "label": [0, 1]}), "not text"),
        (pa.table({"words": ["a"], "label": [1]}), "no columns text and label"),
    ):
        pq.write_table(bad, folder / "test.parquet")
        with pytest.raises(ValueError, match=message) as caught:
            load("imdb", root=tmp_path / "b")
        assert "test.parquet" in str(caught.value)
    (folder / "test.parquet").write_bytes((folder / "train.parquet").read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"test\.parquet is damaged"):
        load("imdb", root=tmp_path / "b")
    (folder / "train.parquet").unlink()
    (folder / "aclImdb_v1.tar.gz").write_bytes(b"\x1f\x8b broken")
    with pytest.raises(ValueError, match=r"aclImdb_v1\.tar\.gz is truncated or damaged"):
        load("imdb", root=tmp_path / "b")


def reviews_archive(root, members):
    """An IMDB archive with the given members beside honest reviews: names to contents, or to the target of a link."""
    path = root / "aclImdb_v1.tar.gz"
    honest = {f"aclImdb/{s}/{k}/1_7.txt": b"good" for s in ("train", "test") for k in ("neg", "pos")}
    with tarfile.open(path, "w:gz", compresslevel=9) as file:
        for name, content in {**honest, **members}.items():
            entry = tarfile.TarInfo(name)
            if isinstance(content, str):
                entry.type, entry.linkname = tarfile.SYMTYPE, content
                file.addfile(entry)
            else:
                entry.size = len(content)
                file.addfile(entry, io.BytesIO(content))
    return path


def test_archives_are_read_with_a_limit(tmp_path, monkeypatch):
    """Eight megabytes of zeros, zipped, are a few kilobytes on the disk and were read as a whole."""
    assert imdb.read_archive(reviews_archive(tmp_path, {}))[0] == (["good", "good"], [0, 1])
    bomb = bytes(2**20 + 1)
    with pytest.raises(ValueError, match=r"train/neg/2_1\.txt has 1048577 bytes, more than the 1048576"):
        imdb.read_archive(reviews_archive(tmp_path, {"aclImdb/train/neg/2_1.txt": bomb}))
    assert imdb.read_archive(reviews_archive(tmp_path, {"aclImdb/README": bomb}))[0][1] == [0, 1]
    monkeypatch.setattr(imdb, "_TOTAL", 2**20)
    with pytest.raises(ValueError, match="holds more than 1048576 bytes"):
        imdb.read_archive(reviews_archive(tmp_path, {"aclImdb/README": bomb}))
    monkeypatch.setattr(formats, "_MEMBERS", 5)
    with pytest.raises(ValueError, match="or 5 files, which the real one does not"):
        imdb.read_archive(reviews_archive(tmp_path, {f"aclImdb/{n}": b"" for n in range(3)}))


def test_links_in_archives_are_not_followed(tmp_path):
    path = reviews_archive(tmp_path, {"aclImdb/train/neg/2_1.txt": "/etc/passwd"})
    with pytest.raises(ValueError, match=r"train/neg/2_1\.txt is a link, which is not followed"):
        imdb.read_archive(path)
