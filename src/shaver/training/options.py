"""The settings of training that most runs leave alone."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch.optim import Optimizer

from shaver.batches import Forward, Targets, forward_of, targets_of
from shaver.likelihoods import Likelihood
from shaver.naming import check_count, check_name, check_number
from shaver.training.history import Logger
from shaver.training.optimizers import OptimizerLike, ScheduleLike, check_schedule

#: Number types of mixed precision, by name.
AMP_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

#: Fields that change how a run is watched and not what it computes.
_PRESENTATION: Mapping[str, Any] = {"compare": False}


@dataclass(frozen=True)
class Options:
    """The settings of :func:`shaver.fit` that most runs leave alone.

    ``fit(…, clip=1.0)`` and ``fit(…, options=Options(clip=1.0))`` are the same.

    Attributes:
        optimizer: ``"sgd"`` (momentum 0.9), ``"adam"``, ``"adamw"``, a function of the parameters, or an optimizer.
        schedule: ``"cosine"`` (to 1e-6), ``"constant"``, or a function from the share of training done to a factor.
        weight_decay: For a named optimizer. ``None`` is 1/N for MAP, the unit Gaussian prior, and 0 for L1; SpaM
            refuses one, because its prior takes that place.
        likelihood: ``"classification"``, ``"regression"`` or a :class:`shaver.likelihoods.Likelihood`.
        l1: λ, for ``method="l1"`` alone; :func:`shaver.training.search_l1` looks for it.
        clip: Largest norm of the whole gradient.
        accumulate: Batches per optimizer step; the same gradient as one batch of all their samples.
        amp: Mixed precision: ``"float16"`` (with a gradient scaler), ``"bfloat16"``, or ``None`` for none.
        early_stopping: Stop when the log evidence has not risen for this many epochs; SpaM only, needs no
            validation data. The weights of the last epoch are kept.
        resume: Continue from the newest checkpoint in ``folder``, if it is of the same run. False removes what is
            there. ``"anyway"`` continues even if the data or the initial weights are others.
        progress: Show a bar with the time left. ``None``: in a terminal, unless there is a logger.
        logger: Gets every row as ``log(row, epoch)``; ``"tensorboard"`` writes into ``folder/tensorboard``.
        forward: ``forward(model, batch)``, for batches that are neither tuples nor dicts.
        targets: ``targets(batch)``, likewise.
    """

    optimizer: OptimizerLike = "sgd"
    schedule: ScheduleLike = "cosine"
    weight_decay: float | None = None
    likelihood: str | Likelihood = "classification"
    l1: float = 1e-4
    clip: float | None = None
    accumulate: int = 1
    amp: str | None = None
    early_stopping: int | None = None
    resume: bool | str = field(default=True, metadata=_PRESENTATION)
    progress: bool | None = field(default=None, metadata=_PRESENTATION)
    logger: Logger | str | None = field(default=None, metadata=_PRESENTATION)
    forward: Forward = field(default=forward_of, metadata=_PRESENTATION)
    targets: Targets = field(default=targets_of, metadata=_PRESENTATION)

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        if self.amp is not None:
            check_name("amp type", self.amp, AMP_TYPES)
        for name in ("accumulate", "early_stopping"):
            if getattr(self, name) is not None:
                check_count(name, getattr(self, name))
        for name in ("weight_decay", "l1"):
            if getattr(self, name) is not None:
                check_number(name, getattr(self, name), least=0)
        if self.clip is not None:
            check_number("clip", self.clip, least=0, above=True)
        if self.resume not in (True, False, "anyway"):
            raise ValueError(f'resume is True, False or "anyway", not {self.resume!r}.')
        if isinstance(self.logger, str):
            check_name("logger", self.logger, ["tensorboard"])
        elif self.logger is not None and not callable(getattr(self.logger, "log", None)):
            raise TypeError(f"a logger has log(row, epoch); {self.logger!r} has not.")
        for name in ("forward", "targets"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} is a function, not {getattr(self, name)!r}.")
        if not (isinstance(self.optimizer, str | Optimizer) or callable(self.optimizer)):
            raise TypeError(
                f"optimizer is a name, a function of the parameters or an optimizer, not {self.optimizer!r}."
            )

    def settled(self) -> dict[str, Any]:
        """What changes the numbers of a run, by name; the optimizer and the likelihood have state and are not here."""
        left_out = ("optimizer", "likelihood")
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.metadata and f.name not in left_out}


def options_with(options: Options | None, more: Mapping[str, Any]) -> Options:
    """The options with further ones by keyword.

    Raises:
        TypeError: ``options`` is something else.
        ValueError: A keyword is unknown, with the nearest match.
    """
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options takes shaver.training.Options(…), not {options!r}.")
    for name in more:
        check_name("argument of fit", name, [*_ARGUMENTS, *(f.name for f in fields(Options))])
    return replace(options or Options(), **more)


#: The arguments of fit itself, for the nearest match of a misspelt one.
_ARGUMENTS = ("method", "epochs", "lr", "batch_size", "spam", "masks", "online", "seed", "folder", "options")
