"""The results of runs as one data frame: a row for each network, criterion and sparsity."""

from pathlib import Path
from typing import TYPE_CHECKING

from shaver.lab.run.folder import read_study, read_table

if TYPE_CHECKING:
    from pandas import DataFrame


def load_runs(*folders: str | Path) -> "DataFrame":
    """The results of one or more run folders as one data frame.

    Example:
        >>> frame = load_runs("runs/lenet-mnist-cpu", "runs/fcn-mnist-cpu")     # doctest: +SKIP
        >>> frame.query("criterion == 'opd'").groupby(["method", "sparsity"]).accuracy.mean()  # doctest: +SKIP

    Args:
        folders: Folders of ``shaver run``. A row that several of them share (recipes share networks) appears once
            for each, under that recipe's name.

    Returns:
        The columns :data:`~shaver.lab.run.folder.COLUMNS`; missing numbers are NaN, missing names empty.

    Raises:
        FileNotFoundError: A folder is missing, or not the folder of a study.
        ValueError: A file in it is damaged, or there are no results yet.
        ImportError: Pandas is missing.
    """
    if not folders:
        raise ValueError("load_runs needs at least one folder, such as runs/lenet-mnist-cpu.")
    frames = []
    for folder in map(Path, folders):
        read_study(folder)
        frames.append(read_table(folder))
    import pandas

    return pandas.concat(frames, ignore_index=True)
