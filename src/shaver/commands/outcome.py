"""What a command on a network leaves: its measures before and after, and a folder that is complete or not there."""

import math
import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import nn

from shaver.commands.setting import Setting
from shaver.files import save
from shaver.files.folder import PLAN
from shaver.lab.run.sweep import Row
from shaver.measure import cost, quality


def check_free(out: Path) -> None:
    """Refuse a folder in which something else would be mixed up with the network."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / PLAN).exists())):
        raise ValueError(
            f"--out {out} exists and holds something else; choose a new folder, or one that --out wrote before."
        )


def measure_network(model: nn.Module, setting: Setting) -> Row:
    """Quality where there are data, size always, work and time where there is an input."""
    data = setting.data
    row: Row = {}
    if data is not None:
        row |= quality(model, data.test.batches, likelihood=setting.likelihood).as_dict()
        del row["count"]
    parameters = list(model.parameters())
    row |= {
        "parameters": sum(p.numel() for p in parameters),
        "nonzeros": sum(int(p.detach().count_nonzero()) for p in parameters),
        "bytes_dense": sum(p.numel() * p.element_size() for p in [*parameters, *model.buffers()]),
    }
    with tempfile.TemporaryDirectory() as folder:  # what the files really take, headers and all
        row["bytes_stored"] = size_of(save(model, folder))
    if setting.example is not None:
        measured = cost(model, setting.example).as_dict()
        row |= {key: measured[key] for key in ("flops", "flops_sparse", "latency_1", "latency_128")}
    return row


def size_of(folder: Path) -> int:
    """Bytes of a folder's files."""
    return sum(file.stat().st_size for file in folder.iterdir())


@contextmanager
def complete_folder(out: Path) -> Iterator[Path]:
    """A folder to write into that becomes ``out`` at the end; ``out`` itself if it holds an earlier network.

    That one is safe too: ``save`` replaces a network in one moment.
    """
    if (out / PLAN).exists():
        yield out
        return
    folder = out.parent / f".{out.name}.{os.getpid()}.part"
    folder.mkdir(parents=True)
    try:
        yield folder
        if out.exists():
            out.rmdir()  # it is empty, which was checked
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def finite(value: Any) -> Any:
    """JSON has no infinity: what is not finite becomes null."""
    if isinstance(value, dict):
        return {key: finite(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
