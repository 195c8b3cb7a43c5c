"""The settings of training that most runs do not change."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from shaver.batches import Forward, Targets, forward_of, targets_of
from shaver.likelihoods import Likelihood
from shaver.naming import check_count, check_name, check_number
from shaver.training.history import Logger
from shaver.training.optimizers import SCHEDULES, OptimizerLike, ScheduleLike

#: Data types of mixed precision, by name.
AMP_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}

#: Marks fields that do not change the numbers of a run.
_PRESENTATION: Mapping[str, Any] = {"compare": False}


@dataclass(frozen=True)
class Options:
    """The settings of :func:`shaver.fit` that most runs do not change.

    ``fit(…, clip=1.0)`` and ``fit(…, options=Options(clip=1.0))`` are equivalent.

    Attributes:
        optimizer: ``"sgd"`` (momentum 0.9), ``"adam"``, ``"adamw"``, a function of the parameters, or an optimizer.
        schedule: Learning rate schedule: ``"cosine"`` (to 1e-6), ``"constant"``, or a function from the share of
            training done, 0 to 1, to a factor.
        weight_decay: Weight decay of a named optimizer. Default: 1/N for MAP (the unit Gaussian prior), 0 for L1. For
            SpaM it is the prior from which δ is learned (:attr:`shaver.settings.Settings.weight_decay`), by default
            T/N, and the optimizer has none.
        likelihood: ``"classification"``, ``"regression"`` or a :class:`shaver.likelihoods.Likelihood`.
        l1: λ, for ``method="l1"`` only; :func:`shaver.training.search_l1` finds a value.
        teacher: A network with the same outputs, such as the one before pruning. Half of the loss is the divergence
            from its outputs (:meth:`shaver.likelihoods.Likelihood.divergence`). For MAP and L1.
        clip: Largest norm of the whole gradient. Default: no clipping.
        accumulate: Batches per optimizer step. The gradient is that of one batch with all their samples.
        amp: Mixed precision: ``"float16"`` (with a gradient scaler), ``"bfloat16"``, or ``None`` for none.
        early_stopping: Stop if the log evidence has not risen for this many epochs. SpaM only; needs no validation
            data. The weights of the last epoch are kept.
        resume: Continue from the newest checkpoint in ``folder`` if it belongs to the same run. False removes the
            checkpoints. ``"anyway"`` continues even if the data or the initial weights differ.
        progress: Whether to show a progress bar. Default: on a terminal, unless there is a logger.
        logger: Gets each row as ``log(row, epoch)``; ``"tensorboard"`` writes into ``folder/tensorboard``.
        forward: ``forward(model, batch)`` for batches that are neither tuples nor dicts.
        targets: ``targets(batch)`` for batches that are neither tuples nor dicts.
    """

    optimizer: OptimizerLike = "sgd"
    schedule: ScheduleLike = "cosine"
    weight_decay: float | None = None
    likelihood: str | Likelihood = "classification"
    l1: float = 1e-4
    teacher: nn.Module | None = None
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
        if not callable(self.schedule):
            check_name("schedule", self.schedule, SCHEDULES)
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
            raise TypeError(f"a logger needs a method log(row, epoch); {self.logger!r} has none.")
        for name in ("forward", "targets"):
            if not callable(getattr(self, name)):
                raise TypeError(f"{name} is a function, not {getattr(self, name)!r}.")
        if self.teacher is not None and not isinstance(self.teacher, nn.Module):
            raise TypeError(f"teacher is a network (nn.Module), not {self.teacher!r}.")
        if not (isinstance(self.optimizer, str | Optimizer) or callable(self.optimizer)):
            raise TypeError(
                f"optimizer is a name, a function of the parameters or an optimizer, not {self.optimizer!r}."
            )

    def settled(self) -> dict[str, Any]:
        """The options that change the numbers of a run, by name, without those of types of their own."""
        left_out = ("optimizer", "likelihood", "teacher")
        return {f.name: getattr(self, f.name) for f in fields(self) if not f.metadata and f.name not in left_out}


def options_with(options: Options | None, more: Mapping[str, Any]) -> Options:
    """The options, changed by the keywords in ``more``; unknown ones are refused."""
    if options is not None and not isinstance(options, Options):
        raise TypeError(f"options takes shaver.training.Options(…), not {options!r}.")
    for name in more:
        check_name("argument of fit", name, [*_ARGUMENTS, *(f.name for f in fields(Options))])
    return replace(options or Options(), **more)


#: The arguments of fit itself, to suggest the nearest match for a misspelt one.
_ARGUMENTS = ("method", "epochs", "lr", "batch_size", "spam", "masks", "online", "seed", "folder", "options")
