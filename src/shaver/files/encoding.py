"""Sparse tensors as bytes: the positions of the values in the shortest of four codes, and the values."""

from collections.abc import Mapping

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

#: A gap byte of this value means: skip 255 entries and add the next byte.
_ESCAPE = 255


def encode(tensor: Tensor, mask: Tensor | None = None) -> tuple[str, dict[str, Tensor]]:
    """The name of the shortest code for a tensor, and its parts.

    - ``dense``: only ``values``, uncompressed.
    - ``bits``: ``where`` has one bit per entry; ``values`` has the stored entries.
    - ``gaps``: ``where`` has one byte per stored entry, the distance from the previous one (more bytes for long gaps).
    - ``indices``: ``where`` has the positions as 32-bit (or 64-bit) integers.

    Args:
        tensor: Any tensor; complex and quantised tensors are stored dense.
        mask: The entries to store, zero or not. Default: every entry but zeros. −0, which a negative weight times a
            mask gives, comes back as 0.
    """
    dense = {"values": tensor.detach().cpu().contiguous()}
    present = _present(dense["values"]) if mask is None else mask.cpu().reshape(-1).numpy()
    if present is None:
        return "dense", dense
    positions = np.flatnonzero(present)
    wide = np.int32 if present.size <= np.iinfo(np.int32).max else np.int64
    candidates = {"bits": np.packbits(present), "gaps": _to_gaps(positions), "indices": positions.astype(wide)}
    code = min(candidates, key=lambda name: candidates[name].nbytes)
    width = dense["values"].element_size()
    if candidates[code].nbytes + len(positions) * width >= present.size * width:
        return "dense", dense
    values = dense["values"].reshape(-1)[torch.from_numpy(positions)]
    return code, {"where": torch.from_numpy(candidates[code]), "values": values}


def decode(code: str, parts: Mapping[str, Tensor], shape: torch.Size) -> tuple[Tensor, Tensor | None]:
    """The tensor, and a mask of its stored entries (``None`` for dense)."""
    values = parts["values"]
    if code == "dense":
        if values.shape != shape:
            raise ValueError(f"values of shape {tuple(values.shape)} for a tensor of shape {tuple(shape)}")
        return values, None
    size = shape.numel()
    where = parts["where"].numpy()
    if code == "bits":
        if where.dtype != np.uint8 or len(where) != (size + 7) // 8:
            raise ValueError("a bit mask of the wrong length")
        positions = np.flatnonzero(np.unpackbits(where, count=size))
    elif code == "gaps":
        positions = _from_gaps(where)
    elif code == "indices":
        positions = where.astype(np.int64)
    else:
        raise ValueError(f"the unknown code {code!r}")
    if len(positions) != len(values):
        raise ValueError(f"{len(values)} values for {len(positions)} positions")
    if len(positions) and (positions[0] < 0 or positions[-1] >= size or bool((np.diff(positions) <= 0).any())):
        raise ValueError("positions outside the tensor or out of order")
    index = torch.from_numpy(positions)
    flat = torch.zeros(size, dtype=values.dtype)
    flat[index] = values
    present = torch.zeros(size, dtype=torch.bool)
    present[index] = True
    return flat.reshape(shape), present.reshape(shape)


def _present(values: Tensor) -> NDArray[np.bool_] | None:
    """A mask of the entries that are not zero, by their bits; ``None`` for types without bit access."""
    if values.is_complex() or values.is_quantized or values.numel() == 0:
        return None
    size = values.element_size()
    pattern = values.reshape(-1).view({1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[size])
    if values.is_floating_point():
        pattern = pattern & torch.iinfo(pattern.dtype).max  # without the sign
    present: NDArray[np.bool_] = (pattern != 0).numpy()
    return present


def _to_gaps(positions: NDArray[np.intp]) -> NDArray[np.uint8]:
    gaps = np.diff(positions, prepend=-1) - 1  # number of entries between each stored entry and the previous one
    ends = np.cumsum(gaps // _ESCAPE + 1) - 1
    coded = np.full(int(ends[-1]) + 1 if len(ends) else 0, _ESCAPE, dtype=np.uint8)
    coded[ends] = gaps % _ESCAPE
    return coded


def _from_gaps(coded: NDArray[np.uint8]) -> NDArray[np.intp]:
    if coded.dtype != np.uint8 or (len(coded) and coded[-1] == _ESCAPE):
        raise ValueError("incomplete gaps")
    ends = np.flatnonzero(coded != _ESCAPE)
    passed = np.cumsum(coded, dtype=np.int64)[ends]  # entries not stored before each stored one
    positions: NDArray[np.intp] = passed + np.arange(len(ends))
    return positions
