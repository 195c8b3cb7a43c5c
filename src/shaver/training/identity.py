"""The identity of a run: settings, network, data and initial weights. Checkpoints of other runs are refused."""

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.utils.data import DataLoader

#: Of an array with more bytes than this, only evenly spaced rows are read.
_WHOLE = 2**28
#: Depth to which the attributes of a data set are followed.
_DEPTH = 6


def check_same(path: Path, saved: Mapping[str, Any], asked: Mapping[str, Any]) -> None:
    """Refuse to continue a run with other settings, other data or another network; the error has both values."""
    differences = []
    for key in dict.fromkeys([*saved, *asked]):
        ours, theirs = asked.get(key), saved.get(key)
        if ours == theirs:
            continue
        if isinstance(ours, Mapping) and isinstance(theirs, Mapping):
            parts = [k for k in dict.fromkeys([*theirs, *ours]) if ours.get(k) != theirs.get(k)]
            shown = [f"{key}[{k!r}]: {theirs.get(k)!r} there, {ours.get(k)!r} here" for k in parts[:3]]
            differences += shown + ([f"… and {len(parts) - 3} more in {key}"] if len(parts) > 3 else [])
        else:
            differences.append(f"{key}: {theirs!r} there, {ours!r} here")
    if not differences:
        return
    hint = ""
    if saved.get(START) != asked.get(START):
        hint = " Call torch.manual_seed(…) before creating the network to get the same initial weights each time."
    raise ValueError(
        f"{path} belongs to another run: {'; '.join(differences)}.{hint} "
        'Use another folder, the same settings, resume=False to start over, or resume="anyway" to continue with other '
        "data or initial weights."
    )


#: Entries of a run's identity: initial weights and data.
START, DATA, VALID = "initial weights", "data", "validation data"


def describe(value: object) -> Any:
    """A setting as plain values that can be saved and compared. Functions and objects are represented by their name."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        return {str(k): describe(v) for k, v in value.items()}
    if isinstance(value, tuple | list):
        return [describe(v) for v in value]
    if isinstance(value, Tensor):
        return fingerprint(value)
    named = value if hasattr(value, "__qualname__") else type(value)
    return f"{getattr(named, '__module__', '?')}.{getattr(named, '__qualname__', '?')}"


def describe_optimizer(asked: object, optimizer: Optimizer) -> Any:
    """A named optimizer by its name, and a user's own by its type and the settings of its groups."""
    if isinstance(asked, str):
        return asked
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    return {"type": describe(type(optimizer))} | {f"group {i}": describe(group) for i, group in enumerate(groups)}


def fingerprint(value: object) -> str:
    """A short checksum of weights, masks, or the tensors that data consist of.

    For other objects, such as a data set, the tensors, arrays and lists among its attributes count. Data that are
    computed on the fly or read from disk are not included.
    """
    checksum = hashlib.sha256()
    _add(checksum, value, _DEPTH)
    return checksum.hexdigest()[:12]


def shapes_of(model: nn.Module) -> dict[str, str]:
    """The network's parameters, each with its shape."""
    return {name: "×".join(map(str, p.shape)) or "scalar" for name, p in model.named_parameters()}


def _add(checksum: Any, value: object, depth: int) -> None:
    if isinstance(value, Tensor):
        plain = value.detach()
        if plain.layout == torch.strided and not plain.is_meta:
            _add_array(checksum, _thinned(plain).cpu().contiguous().reshape(-1).view(torch.uint8).numpy(), value)
    elif isinstance(value, np.ndarray):
        if value.dtype != object:
            _add_array(checksum, np.ascontiguousarray(_thinned(value)).reshape(-1).view(np.uint8), value)
    elif value is None or isinstance(value, bool | int | float | str | bytes):
        checksum.update(repr(value).encode())
    elif isinstance(value, Mapping):
        for key, entry in value.items():
            checksum.update(repr(key).encode())
            _add(checksum, entry, depth - 1)
    elif isinstance(value, tuple | list | range):
        checksum.update(f"{type(value).__name__} {len(value)}\n".encode())
        for entry in value:
            _add(checksum, entry, depth - 1)
    elif isinstance(value, DataLoader):
        checksum.update(f"{value.batch_size} {value.drop_last} {type(value.sampler).__name__}\n".encode())
        _add(checksum, value.dataset, depth - 1)
    elif depth > 0 and hasattr(value, "__dict__") and not callable(value) and not isinstance(value, nn.Module):
        checksum.update(f"{type(value).__name__}\n".encode())
        for name, entry in vars(value).items():
            if not isinstance(entry, bool | int | float | str | bytes | None):  # counters, such as the epoch
                checksum.update(f"{name}\n".encode())
                _add(checksum, entry, depth - 1)


def _add_array(checksum: Any, content: np.ndarray[Any, Any], original: Any) -> None:
    checksum.update(f"{original.dtype} {tuple(original.shape)}\n".encode())
    checksum.update(content.data)


def _thinned(array: Any) -> Any:
    """The array, or evenly spaced rows of it if it is too large to read completely."""
    size = array.nbytes if isinstance(array, np.ndarray) else array.numel() * array.element_size()
    return array if size <= _WHOLE or not len(array.shape) else array[:: -(-size // _WHOLE)]
