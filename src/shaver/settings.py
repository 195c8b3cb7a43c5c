"""How SpaM learns δ: its settings, those for fine-tuning, and the paper's. Imports no torch: help starts at once."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from shaver.naming import check_count, check_name, check_number, shown

#: log δ is kept between these: a weight the data know nothing about would have δ = 0, an irrelevant one δ = ∞.
LOG_BOUNDS = (math.log(1e-6), math.log(1e12))


@dataclass(frozen=True)
class Settings:
    """How SpaM learns δ. The defaults were measured; see the documentation's page on defaults.

    Attributes:
        source: Where H comes from: ``"mc"`` or ``"ef"`` online; ``"ggn"``, ``"ef"`` or ``"mc"`` by epochs.
        online: Learn from training's own passes. False is the paper's way: a pass over the data every ``frequency``
            epochs, in :meth:`SpaM.end_epoch`. Kronecker curvature is always learned by epochs.
        every: Online: steps between curvature measurements; four times as many while no update of δ is near. None: 10,
            or fewer where updates are closer than 50 steps.
        decay: Online: decay of the moving average of H, per measurement.
        update: Online: steps between two updates of δ. None: 50, or fewer in a training so short that there would be
            less than five updates.
        burn_in: Share of ``total_steps`` (by epochs: the number of epochs) before the first update of δ.
        freeze: Share of ``total_steps`` after which δ stays as it is, so that the weights settle.
        shrink: How much of the posterior mean's move is made at each update of δ: 1 all, ½ half in log θ, 0 none.
        proximal: The prior as a proximal step after the optimizer's, stable for every δ; False adds δθ/N to the
            gradient, as in the paper.
        frequency: By epochs: epochs between two updates.
        method: ``"fixed_point"`` or ``"gradient"``, the paper's 100 steps of Adam on log δ.
        temperature: T: the likelihood counts 1/T times, in H and against the prior.
        initial_precision: δ before the first update.
        bounds: Lowest and highest log δ.
        loss: ``"mean"``, ``"sum"`` or ``"auto"``: see :class:`shaver.curvature.OnlineCurvature`. By epochs: a mean.
    """

    source: str = "mc"
    online: bool = True
    every: int | None = None
    decay: float = 0.95
    update: int | None = None
    burn_in: float = 0.1
    freeze: float = 0.7
    shrink: float = 0.75
    proximal: bool = True
    frequency: int = 1
    method: str = "fixed_point"
    temperature: float = 1.0
    initial_precision: float = 1.0
    bounds: tuple[float, float] = LOG_BOUNDS
    loss: str = "auto"

    def __post_init__(self) -> None:
        check_name("source", self.source, ("mc", "ef") if self.online else ("ggn", "ef", "mc"))
        check_name("method", self.method, ("fixed_point", "gradient"))
        check_name("loss", self.loss, ("auto", "mean", "sum"))
        if not self.online and self.loss == "sum":
            raise ValueError('by epochs (online=False) the loss is a mean over samples; loss="sum" needs online=True.')
        for name in ("every", "update", "frequency"):
            if getattr(self, name) is not None or name == "frequency":
                check_count(name, getattr(self, name))
        for name in ("online", "proximal"):
            if not isinstance(getattr(self, name), bool):
                raise ValueError(f"{name} must be True or False, not {getattr(self, name)!r}.")
        for name, most in (("shrink", 1), ("freeze", 1), ("decay", 1), ("burn_in", math.inf)):
            check_number(name, getattr(self, name), least=0, most=most)
        if self.decay == 1:
            raise ValueError(f"decay must be below 1, not {self.decay!r}: the average would never change.")
        for name in ("temperature", "initial_precision"):
            check_number(name, getattr(self, name), least=0, above=True)
        low, high = (check_number(f"bounds[{i}]", bound) for i, bound in enumerate(self.bounds))
        if not low < high:
            raise ValueError(f"bounds are the lowest and the highest log δ, not {self.bounds!r}.")
        if self.online and not 0 <= self.burn_in < self.freeze <= 1:
            raise ValueError(
                "online, burn_in and freeze are shares of total_steps, 0 ≤ burn_in < freeze ≤ 1, not "
                f"{self.burn_in!r} and {self.freeze!r}."
            )

    def pace(self, total_steps: int | None) -> tuple[int, int]:
        """``every`` and ``update`` for a training of so many steps, with a warning if δ would never be updated."""
        update = self.update or 50
        if self.update is None and total_steps is not None:
            update = max(1, min(update, int((self.freeze - self.burn_in) * total_steps / 5)))
        if total_steps is not None and int(self.freeze * total_steps / update) * update <= self.burn_in * total_steps:
            warnings.warn(
                f"δ will not be updated in {total_steps} steps with update={update}, burn_in={self.burn_in:g} and "
                f"freeze={self.freeze:g}, so that SpaM does nothing; leave update= out, or train longer.",
                stacklevel=3,
            )
        return self.every or max(1, min(10, update // 5)), update


#: While δ burns in or is frozen, measurements are this many times rarer: H is needed at the next update or at the end.
IDLE = 4

#: For pretrained weights. The prior stays in the gradient, where Adam bounds its step. A weight without a gradient,
#: such as the embedding of an unused word, would lose its pretrained value in the proximal step, because Adam's step
#: size for it is large. The posterior mean's move is off as well: δ from a few samples is noisy, each rise moves
#: weights towards zero, and no fall moves them back.
FINE_TUNING = Settings(shrink=0.0, proximal=False)

#: For Kronecker curvature, which is learned by epochs.
KRONECKER = Settings(online=False, source="ggn", burn_in=0, shrink=0.0)

#: The paper's algorithm: GGN after every epoch, 100 steps of Adam on log δ, the prior as a gradient.
PAPER = Settings(
    source="ggn", online=False, burn_in=0, freeze=1.0, shrink=0.0, proximal=False, method="gradient", loss="mean"
)


def settings_for(structure: str, settings: Settings | None, options: Mapping[str, Any]) -> Settings:
    """The settings of a SpaM: those given, else the structure's own, changed by the options."""
    if settings is not None and not isinstance(settings, Settings):
        raise TypeError(f"settings must be shaver.settings.Settings(…), not {shown(settings)}.")
    for name in options:
        check_name("SpaM option", name, [f.name for f in fields(Settings)])
    if settings is None:
        settings = KRONECKER if structure == "kron" else Settings()
    if structure == "kron" and options.get("online", settings.online):
        raise ValueError('Kronecker curvature is learned by epochs: pass online=False with structure="kron".')
    return replace(settings, **options)
