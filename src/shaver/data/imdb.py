"""IMDB movie reviews: the official ``aclImdb`` folder or archive, and parquet files.

All three give the reviews in the same order: negative reviews first, each half sorted by the number in the official
file name.
"""

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from shaver.data.formats import read_members
from shaver.naming import require

#: Reviews and their labels, 0 negative and 1 positive.
Reviews = tuple[list[str], list[int]]
_REVIEW = re.compile(r"(?:.*/)?(train|test)/(neg|pos)/(\d+)_\d+\.txt")
_SENTIMENTS = ("neg", "pos")
#: Most bytes of one review (the longest has 14,000) and of the whole archive (with its features about 250 million).
_LONGEST, _TOTAL = 2**20, 2**30


def read_folder(paths: Sequence[Path]) -> tuple[Reviews, Reviews]:
    """The folders ``train/neg``, ``train/pos``, ``test/neg``, ``test/pos`` of an unpacked ``aclImdb``."""
    files = (file for folder in paths for file in folder.iterdir())
    found = ((file.as_posix(), file.read_bytes()) for file in files if _REVIEW.fullmatch(file.as_posix()))
    return _collect(found, str(paths[0].parent.parent))


def read_archive(path: Path) -> tuple[Reviews, Reviews]:
    """The official ``aclImdb_v1.tar.gz``. Nothing is unpacked to the disk."""
    found = read_members(path, lambda name: _REVIEW.fullmatch(name) is not None, largest=_LONGEST, total=_TOTAL)
    return _collect(found, str(path))


def read_parquet(paths: Sequence[Path]) -> tuple[Reviews, Reviews]:
    """``train.parquet`` and ``test.parquet`` with columns text and label, and optionally review_id for the order."""
    train, test = (_read_table(path) for path in paths)
    return train, test


def _read_table(path: Path) -> Reviews:
    parquet = require("pyarrow.parquet", f"reading {path.name}", "data")
    arrow = require("pyarrow", f"reading {path.name}", "data")
    try:
        table = parquet.read_table(path)
        if "review_id" in table.column_names:
            table = table.sort_by([("label", "ascending"), ("review_id", "ascending")])
        texts, labels = table["text"].to_pylist(), table["label"].to_pylist()
    except (arrow.ArrowException, KeyError, OSError) as error:
        raise ValueError(f"{path} is damaged or has no columns text and label ({error}).") from error
    if not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"{path} has no reviews, or some that are not text.")
    wrong = next((label for label in labels if label not in (0, 1)), None)
    if wrong is not None or None in labels:
        raise ValueError(f"{path} has the label {wrong!r}; labels are 0 (negative) and 1 (positive).")
    return texts, labels


def _collect(files: Iterable[tuple[str, bytes]], source: str) -> tuple[Reviews, Reviews]:
    rows: dict[str, list[tuple[int, int, str]]] = {"train": [], "test": []}
    for name, content in files:
        match = _REVIEW.fullmatch(name)
        assert match is not None  # both callers pass only matching names
        split, sentiment, number = match.groups()
        try:
            text = content.decode("utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{name} in {source} is not UTF-8 text ({error}); it is damaged.") from error
        rows[split].append((_SENTIMENTS.index(sentiment), int(number), text))
    for split, reviews in rows.items():
        for label, sentiment in enumerate(_SENTIMENTS):
            if not any(row[0] == label for row in reviews):
                raise ValueError(f"{source} holds no reviews under {split}/{sentiment}; it is incomplete.")
        reviews.sort()
    train, test = (([row[2] for row in rows[s]], [row[0] for row in rows[s]]) for s in ("train", "test"))
    return train, test
