"""The history of a training: one row per epoch, written to a file, to TensorBoard or to a user's logger."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from shaver.io import write_csv

if TYPE_CHECKING:
    from shaver.evidence import Posterior
    from shaver.pruning import Masks


class Logger(Protocol):
    """Anything with ``log(row, step)``, such as a run of an experiment tracker."""

    def log(self, row: dict[str, Any], step: int) -> object:
        """Log the row of one epoch; ``step`` is the epoch, counted from 1."""


class History(list[dict[str, Any]]):
    """One dict per epoch: ``epoch``, ``loss``, ``lr``, ``seconds`` and, if available, validation and evidence.

    A row has ``dead=True`` if the network gave every sample the same outputs at the end of the epoch.

    Example:
        >>> history = shaver.fit(model, train, valid, method="map", epochs=2)
        >>> history[-1]["valid_accuracy"], history.column("loss")
        >>> history.to_csv("history.csv")

    Attributes:
        posterior: The posterior from SpaM, for ``shaver.score(model, "opd", posterior=…)``; ``None`` for MAP and L1.
        masks: The masks that were held or made during training, for ``shaver.save(model, folder, masks)``, or ``None``.
    """

    posterior: "Posterior | None" = None
    masks: "Masks | None" = None

    def __str__(self) -> str:
        if not self:
            return "no epochs"
        last = ", ".join(
            f"{name} {value:.4g}" for name, value in self[-1].items() if name not in ("epoch", "lr", "seconds")
        )
        return f"{len(self)} epochs in {sum(self.column('seconds')):.0f} s; the last one: {last}"

    @property
    def dead(self) -> bool:
        """Whether the network ended without learning: its outputs do not depend on its input."""
        return bool(self) and bool(self[-1].get("dead", False))

    def column(self, name: str) -> list[Any]:
        """One quantity per epoch; ``None`` for epochs without it."""
        return [row.get(name) for row in self]

    def to_csv(self, path: str | os.PathLike[str]) -> None:
        """Write the rows as a table with one header line, atomically."""
        write_csv(path, self)


class _Curves:
    """A TensorBoard writer as a logger: one curve per column."""

    def __init__(self, writer: Any) -> None:
        self._writer = writer

    def log(self, row: dict[str, Any], step: int) -> None:
        """Add a point to each curve."""
        for name, value in row.items():
            if name != "epoch":
                self._writer.add_scalar(name, value, step)


@contextmanager
def open_logger(logger: Logger | str | None, folder: Path | None, epoch: int) -> Iterator[Logger | None]:
    """The user's logger; for ``"tensorboard"`` a writer into ``folder`` that continues after ``epoch``."""
    if not isinstance(logger, str):
        yield logger
        return
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError('logger="tensorboard" needs TensorBoard: pip install "shaver[track]".') from error
    assert folder is not None
    # After a crash, epochs that are trained again must not appear twice.
    with SummaryWriter(str(folder / "tensorboard"), purge_step=epoch + 1) as writer:  # type: ignore[no-untyped-call]
        yield _Curves(writer)
