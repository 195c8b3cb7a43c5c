"""The knobs of training that most runs leave alone."""

from dataclasses import dataclass

import torch

from shaver.naming import check_name
from shaver.training.optimizers import ScheduleLike, check_schedule

#: Number types of mixed precision, by name.
AMP_TYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16}


@dataclass(frozen=True)
class Options:
    """The knobs of :func:`shaver.fit` that most runs leave alone.

    Attributes:
        schedule: ``"cosine"`` (to 1e-6), ``"constant"``, or a function from the share of training done to a factor.
        weight_decay: For a named optimizer. ``None`` is 1/N for MAP, the unit Gaussian prior, and 0 for L1; SpaM
            refuses one, because its prior takes that place.
        clip: Largest norm of the whole gradient.
        accumulate: Batches for one optimizer step; the same gradient as one batch of all their samples.
        amp: Mixed precision: ``"float16"`` (with a gradient scaler), ``"bfloat16"``, or ``None`` for none.
        early_stopping: Stop when the log evidence has not risen for this many epochs; SpaM only, needs no
            validation data. The weights of the last epoch are kept.
    """

    schedule: ScheduleLike = "cosine"
    weight_decay: float | None = None
    clip: float | None = None
    accumulate: int = 1
    amp: str | None = None
    early_stopping: int | None = None

    def __post_init__(self) -> None:
        check_schedule(self.schedule)
        if self.amp is not None:
            check_name("amp type", self.amp, AMP_TYPES)
        for name in ("accumulate", "early_stopping"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ValueError(f"{name} must be 1 or more, not {value!r}.")
        if self.clip is not None and not self.clip > 0:
            raise ValueError(f"clip must be a positive norm, not {self.clip!r}.")
