"""SpaM's settings: the defaults, those for fine-tuning, and the paper's. Imports no torch, so ``--help`` is fast."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any

from shaver.naming import check_count, check_flags, check_name, check_number, shown

#: Lowest and highest log δ. Without bounds, δ would be 0 for a weight without curvature and ∞ for an irrelevant one.
LOG_BOUNDS = (math.log(1e-6), math.log(1e12))


#: Steps between two updates of δ, unless the training is short.
USUAL = 50
#: Share of a training after which δ is frozen. In a short training it is lower if the weights then leave the learned
#: prior, because they need time to recover.
FREEZE, FREEZE_TO_DEBIAS = 0.7, 0.6
#: A training of at least this many steps is long. Its loss settles in the first few per cent, when learning δ would
#: still cost accuracy; so if the weights leave the learned prior in the end, δ is learned after this share.
LONG, START = 5000, 1 / 3


@dataclass(frozen=True)
class Settings:
    """How SpaM learns δ. The defaults were chosen by measurement; see the page on defaults in the documentation.

    Some settings apply only when δ is learned online (during training steps), others only when it is learned by
    epochs (``online=False``).

    Attributes:
        source: How H is estimated: ``"mc"`` or ``"ef"`` online; ``"ggn"``, ``"ef"`` or ``"mc"`` by epochs.
        online: Measure H during the training steps. False is the paper's way: a separate pass over the data every
            ``frequency`` epochs, in :meth:`SpaM.end_epoch`. Kronecker curvature is always learned by epochs.
        every: Online: steps between curvature measurements. If ``total_steps`` is known: sixteen times as many while
            neither an update of δ nor the end is near. If not: four times as many after :meth:`SpaM.freeze`. Default:
            15 (10 if weights share a δ), but at most a third of ``update``.
        decay: Online: decay of the moving average of H, per curvature measurement.
        update: Online: steps between updates of δ. Default: 50, or fewer so that a short training has 40 updates (5, if
            weights share a δ). The default is at least 5, unless fewer than five updates would be left.
        burn_in: When the first update of δ may come. Default: once the mean loss has settled, see
            :class:`shaver.watch.Watch`, but after four sevenths of the time before the freeze at the latest (a
            tenth of ``total_steps``, if weights share a δ). If the weights may leave the learned prior (``debias``)
            and ``total_steps`` is at least 5,000: a third. A number is a share of ``total_steps``, and has no effect
            without it; 0 begins at once. By epochs: number of epochs, by default none.
        freeze: Share of ``total_steps`` after which δ no longer changes, so that the weights settle. Default: 0.7, or
            0.6 in shorter trainings whose weights may leave the learned prior.
        debias: After the freeze, train the weights under ``initial_precision``, as before the first update. Then δ no
            longer pulls them, and removed weights may return a little, which restores the accuracy before pruning. The
            posterior then has the δ of highest evidence at the weights in the end. None: online, if each weight has its
            own δ and no noise is learned, once δ is frozen and every learning rate is at most half of its highest
            value; at a higher one the training may become unstable. True: at the freeze in any case. False: never.
        shrink: How far the weights move to the new posterior mean at each update of δ: 1 fully, 0.5 half the way in
            log θ, 0 not at all. If δ is updated more often than every 50 steps, each update moves them less; see
            :meth:`share`. Embedding tables do not move.
        proximal: Apply the prior as a proximal step after the optimizer's step; this is stable for every δ. False
            adds δθ/N to the gradient, as in the paper.
        frequency: By epochs: epochs between updates of δ.
        method: How δ is updated: ``"fixed_point"``, or ``"gradient"`` for the paper's 100 Adam steps on log δ.
        temperature: T: the likelihood counts 1/T times, both in H and in the loss. Default: see
            :func:`fitting_temperature`.
        initial_precision: δ before the first update. It also pulls on the norm of scale-free weights, such as filters
            before a BatchNorm, during the whole training; a learned δ acts on their direction only.
        weight_decay: λ, the weight decay of ordinary training with SGD. Sets ``initial_precision`` to λN/T, so that
            the training has this decay until the first update of δ, and again when the weights have left the learned
            prior. The optimizer's own must be 0. AdamW's weight decay acts differently; leave it out.
        bounds: Lowest and highest log δ.
        loss: Reduction of the training loss: ``"mean"``, ``"sum"`` or ``"auto"``, see
            :class:`shaver.curvature.OnlineCurvature`. By epochs it must be a mean.
    """

    source: str = "mc"
    online: bool = True
    every: int | None = None
    decay: float = 0.95
    update: int | None = None
    burn_in: float | None = None
    freeze: float | None = None
    debias: bool | None = None
    shrink: float = 0.75
    proximal: bool = True
    frequency: int = 1
    method: str = "fixed_point"
    temperature: float | None = None
    initial_precision: float = 1.0
    weight_decay: float | None = None
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
        check_flags(online=self.online, proximal=self.proximal, debias=self.debias is not None and self.debias)
        for name, most in (("shrink", 1), ("freeze", 1), ("decay", 1), ("burn_in", math.inf)):
            if getattr(self, name) is not None or name not in ("burn_in", "freeze"):
                check_number(name, getattr(self, name), least=0, most=most)
        if self.decay == 1:
            raise ValueError(f"decay must be below 1, not {self.decay!r}: the average would never change.")
        for name in ("temperature", "weight_decay", "initial_precision"):
            if getattr(self, name) is not None or name == "initial_precision":
                check_number(name, getattr(self, name), least=0, above=True)
        if self.weight_decay is not None and self.initial_precision != 1.0:
            raise ValueError(
                f"weight_decay={self.weight_decay!r} sets the initial precision, so pass it or "
                f"initial_precision={self.initial_precision!r}, not both."
            )
        low, high = (check_number(f"bounds[{i}]", bound) for i, bound in enumerate(self.bounds))
        if not low < high:
            raise ValueError(f"bounds are the lowest and the highest log δ, not {self.bounds!r}.")
        if self.online and not 0 <= (self.burn_in or 0.0) < self.learned_until <= 1:
            raise ValueError(
                "online, burn_in and freeze are shares of total_steps, 0 ≤ burn_in < freeze ≤ 1, not "
                f"{self.burn_in!r} and {self.learned_until!r}."
            )

    @property
    def learned_until(self) -> float:
        """``freeze``, or its usual value."""
        return FREEZE if self.freeze is None else self.freeze

    def share(self, update: int) -> float:
        """``shrink`` of a single update, if δ is updated every ``update`` steps: 1 − (1 − shrink)^√(update/50).

        It is at most ``shrink``. With the exponent update/50 the weights would move equally far per step, with 1
        equally far per update. The square root gave better results than both.
        """
        return 1.0 - math.pow(1.0 - self.shrink, math.sqrt(min(1.0, update / USUAL)))

    def completed(self, *, has_own: bool, weights: int, data_size: int, total_steps: int | None) -> "Settings":
        """The settings with a value for ``freeze``, ``temperature`` and ``initial_precision``.

        ``debias`` becomes False where the weights may not leave the learned prior. ``burn_in`` gets a value where the
        loss does not decide when learning begins.

        Args:
            has_own: Whether each weight has its own δ and no noise is learned.
            weights: Number of weights.
            data_size: Number of training samples.
            total_steps: Number of steps of the whole training, or None.
        """
        debias = False if self.debias is None and not (self.online and has_own) else self.debias
        is_long = total_steps is not None and total_steps >= LONG
        freeze, burn_in, temperature = self.learned_until, self.burn_in, self.temperature
        if debias is not False and not is_long and self.freeze is None:
            freeze = FREEZE_TO_DEBIAS
        if debias is not False and is_long and has_own and self.online and burn_in is None:
            burn_in = min(START, freeze / 2)
        if temperature is None:
            debiased = debias is not False and total_steps is not None and freeze < 1
            temperature = fitting_temperature(weights, data_size, debiased=debiased) if has_own else 1.0
        own: dict[str, Any] = {"debias": debias, "burn_in": burn_in, "freeze": freeze, "temperature": temperature}
        if self.weight_decay is not None:
            own |= {"initial_precision": self.weight_decay * data_size / temperature, "weight_decay": None}
        return replace(self, **own)


#: With more weights per sample than this, several weights are taken to share one direction that the data determine.
MANY = 16


def fitting_temperature(weights: int, data_size: int, *, debiased: bool) -> float:
    """The default temperature where each of P weights has its own δ: T = (16 N/P)³, or √(N/P), at most 1.

    With a diagonal curvature each weight is judged as if the others stayed. If K weights stand for one direction that
    the data determine, each has a K-th of the effect, so removing one costs a K²-th of what removing all costs.
    Counting the data K² times judges each as if all went together. K² = (P/(16 N))³ was chosen by measurement; see the
    page on defaults.

    Args:
        weights: P.
        data_size: N.
        debiased: Whether the weights are expected to leave the learned prior at the end. If not, what δ removes is lost
            to the network before pruning; then √(N/P), which removes less of a network with 1 to 40 weights per
            sample, was better.
    """
    ratio = data_size / max(weights, 1)
    return min(1.0, (MANY * ratio) ** 3 if debiased else math.sqrt(ratio))


#: For pretrained weights. The prior is part of the gradient, because Adam bounds that step. A proximal step would be
#: very large for a weight without a gradient, such as the embedding of an unused word, and would erase what was
#: pretrained. Shrinking to the posterior mean would too: δ from a few samples is noisy, each rise of δ shrinks weights,
#: and a later fall does not restore them. The loss may not fall at all, so the start does not wait for it.
FINE_TUNING = Settings(burn_in=0.1, debias=False, shrink=0.0, proximal=False, temperature=1.0)

#: For Kronecker curvature, which is learned by epochs.
KRONECKER = Settings(online=False, source="ggn", shrink=0.0, temperature=1.0)

#: The paper's algorithm: GGN after every epoch, 100 Adam steps on log δ, the prior as a gradient.
PAPER = Settings(
    source="ggn", online=False, freeze=1.0, shrink=0.0, proximal=False, method="gradient", loss="mean",
    temperature=1.0,
)  # fmt: skip


def settings_for(structure: str, settings: Settings | None, options: Mapping[str, Any]) -> Settings:
    """The settings of one SpaM: ``settings``, or the defaults for the structure, changed by ``options``."""
    if settings is not None and not isinstance(settings, Settings):
        raise TypeError(f"settings must be shaver.settings.Settings(…), not {shown(settings)}.")
    for name in options:
        check_name("SpaM option", name, [f.name for f in fields(Settings)])
    if settings is None:
        settings = KRONECKER if structure == "kron" else Settings()
    if structure == "kron" and options.get("online", settings.online):
        raise ValueError('Kronecker curvature is learned by epochs: pass online=False with structure="kron".')
    return replace(settings, **options)
