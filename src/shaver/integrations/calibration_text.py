"""Windows of tokens for calibration: from a text file, a column of a parquet file, or a file of token ids."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from shaver.io import load_tensors
from shaver.naming import require

#: Characters that are read and tokenised at a time.
_CHUNK = 2**20


def read_windows(
    path: str | Path, tokenizer: Any = None, *, length: int = 512, count: int = 64, column: str = "text"
) -> Tensor:
    """The first windows of a calibration file, one after the other, without padding.

    Args:
        path: ``.parquet``: the texts of a column. ``.npy`` or ``.safetensors``: token ids. Any other name: UTF-8 text.
        tokenizer: Of the model; not needed for token ids.
        length: Tokens per window.
        count: Windows wanted. A shorter file gives fewer.
        column: Of a parquet file.

    Returns:
        Token ids, ``(windows, length)``.

    Raises:
        ValueError: The file cannot be read as what its name says, or has fewer tokens than one window.
        FileNotFoundError: There is no such file.
    """
    place = Path(path)
    if length < 2 or count < 1:
        raise ValueError(f"a window has at least 2 tokens and there is at least one, not {count} of {length}.")
    if not place.is_file():
        raise FileNotFoundError(f"there is no calibration file {place}.")
    if place.suffix in (".npy", ".safetensors"):
        ids = _stored(place)[: length * count]
    else:
        if tokenizer is None:
            raise ValueError(
                f"{place} is text, and the model's folder has no tokenizer: put its tokenizer files there, or give "
                "token ids as an .npy or .safetensors file."
            )
        texts = _column(place, column) if place.suffix == ".parquet" else _text(place)
        ids = _tokens(texts, tokenizer, length * count)
    whole = len(ids) // length
    if not whole:
        raise ValueError(
            f"{place} has {len(ids)} tokens, fewer than one window of {length}: give a longer text or shorter windows."
        )
    return ids[: whole * length].reshape(whole, length)


def _tokens(texts: Iterable[str], tokenizer: Any, wanted: int) -> Tensor:
    ids: list[int] = []
    for text in texts:
        ids += tokenizer(text, verbose=False)["input_ids"]
        if len(ids) >= wanted:
            break
    return torch.tensor(ids[:wanted], dtype=torch.long)


def _text(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8") as file:
            while lines := file.readlines(_CHUNK):
                yield "".join(lines)
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text ({error}).") from error


def _column(path: Path, column: str) -> Iterator[str]:
    parquet = require("pyarrow.parquet", f"reading {path.name}", "data")
    arrow = require("pyarrow", f"reading {path.name}", "data")
    try:
        file = parquet.ParquetFile(path)
        names = file.schema_arrow.names
        if column not in names:
            raise ValueError(f"{path} has no column {column!r}; its columns are {', '.join(names)}.")
        for batch in file.iter_batches(64, columns=[column]):
            texts = batch.column(0).to_pylist()
            if not all(isinstance(text, str) for text in texts):
                raise ValueError(f"the column {column!r} of {path} does not hold only text.")
            yield from texts
    except arrow.ArrowException as error:
        raise ValueError(f"{path} is damaged or not a parquet file ({error}).") from error


def _stored(path: Path) -> Tensor:
    if path.suffix == ".npy":
        try:
            ids = torch.from_numpy(np.load(path, allow_pickle=False).astype(np.int64, casting="safe"))
        except (ValueError, TypeError, OSError) as error:
            raise ValueError(f"{path} does not hold an array of token ids ({error}).") from error
        return ids.flatten()
    tensors = load_tensors(path)
    if len(tensors) != 1 or next(iter(tensors.values())).is_floating_point():
        raise ValueError(f"{path} should hold one tensor of token ids, not {', '.join(tensors) or 'none'}.")
    return next(iter(tensors.values())).flatten().long()
