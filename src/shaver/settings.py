"""How SpaM learns δ: its settings, those for fine-tuning, and the paper's. Imports no torch: help comes at once."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from shaver.naming import check_name

#: log δ is kept between these: a weight the data know nothing about would have δ = 0, an irrelevant one δ = ∞.
LOG_BOUNDS = (math.log(1e-6), math.log(1e12))


@dataclass(frozen=True)
class Settings:
    """How SpaM learns δ. The defaults were chosen by measurement, see the documentation's page on defaults.

    Attributes:
        source: Where H comes from: ``"mc"`` or ``"ef"`` online; ``"ggn"``, ``"ef"`` or ``"mc"`` by epochs.
        online: Learn from training's own passes. False is the paper's way: a pass over the data every ``frequency``
            epochs, in :meth:`SpaM.end_epoch`. Kronecker curvature is always learned by epochs.
        every: Online: look at every so many steps; at every fourth of those only, while no update of δ is near. None:
            10, or fewer where updates are closer than 50 steps.
        decay: Online: of the moving average of H, for each look.
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
            if getattr(self, name) is not None and getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)!r}.")
        if not 0 <= self.shrink <= 1:
            raise ValueError(f"shrink must be between 0 and 1, not {self.shrink!r}.")
        if not (self.temperature > 0 and math.isfinite(self.temperature)):
            raise ValueError(f"temperature must be positive and finite, not {self.temperature!r}.")
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


#: While δ burns in or is frozen, looks are so many times rarer: H is wanted at the next update or at the end only.
IDLE = 4

#: For pretrained weights. The prior stays in the gradient, where Adam bounds its step: the proximal step of a weight
#: that no gradient reaches (a word that no text has) is as large as Adam's is for it, and takes what was pretrained. So
#: does the posterior mean's move: δ from a few samples is noisy, each rise moves weights inwards, and no fall moves
#: them out again.
FINE_TUNING = Settings(shrink=0.0, proximal=False)

#: For Kronecker curvature, which is learned by epochs.
KRONECKER = Settings(online=False, source="ggn", burn_in=0, shrink=0.0)

#: The paper's algorithm: GGN after every epoch, 100 steps of Adam on log δ, the prior as a gradient.
PAPER = Settings(
    source="ggn", online=False, burn_in=0, freeze=1.0, shrink=0.0, proximal=False, method="gradient", loss="mean"
)


def settings_for(structure: str, settings: Settings | None, options: Mapping[str, Any]) -> Settings:
    """What a SpaM goes by that is given these: the structure's own settings where there are none, and the options."""
    for name in options:
        check_name("SpaM option", name, [f.name for f in fields(Settings)])
    if settings is None:
        settings = KRONECKER if structure == "kron" else Settings()
    if structure == "kron" and options.get("online", settings.online):
        raise ValueError('Kronecker curvature is learned by epochs: pass online=False with structure="kron".')
    return replace(settings, **options)
