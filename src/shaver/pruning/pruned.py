"""``prune``: set the weights with the lowest scores to zero, and report the requested and achieved sparsity."""

import re
import warnings
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from torch import Tensor, nn

from shaver.batches import Forward, Targets, check_network
from shaver.criteria import PosteriorLike, prunable
from shaver.criteria.prunable_weights import input_dim
from shaver.criteria.registry import check_posterior
from shaver.naming import check_functions, check_number
from shaver.pruning.automatic import DEFAULT_NATS, weigh
from shaver.pruning.masks import Masks
from shaver.pruning.ranking import Ranking, check_limits, check_scores, check_sparsity, n_of_m
from shaver.pruning.rounds import Rounds
from shaver.pruning.search import Quality, highest_sparsity, quality_on
from shaver.repairing import Repaired
from shaver.repairing.joint import check_passes

_NOT_LEARNED = (
    'sparsity="auto" compares the evidence with and without each weight, which says something only if δ was learned; '
    'this posterior has one δ that was given as a number. Train with method="spam", or let validation data decide: '
    "max_drop=0.01, valid=…."
)


@dataclass(frozen=True)
class PrunedLayer:
    """The row of one parameter in the report."""

    name: str
    shape: tuple[int, ...]
    total: int
    kept: int

    @property
    def sparsity(self) -> float:
        """The share of the parameter's weights that was removed."""
        return 1 - self.kept / self.total if self.total else 0.0


@dataclass(frozen=True)
class Pruned:
    """The report of pruning. ``print(pruned)`` shows a table.

    Attributes:
        requested: The requested sparsity: a share, ``"auto"``, ``"2:4"`` or another N:M, or the tolerated drop.
        masks: Which weights were kept; ``masks.hold(model, optimizer)`` keeps the zeros during fine-tuning.
        evidence_change: Change of the log evidence by the removal under the diagonal Laplace model, −ΣG in nats;
            ``None`` without a posterior.
        loss_rise: Expected rise of the loss summed over the data, Σ(δθ² + ½hθ²); ``None`` without a posterior.
        quality_before: Validation quality of the dense network, with ``max_drop``.
        quality_after: Validation quality of the pruned network, with ``max_drop``.
        repaired: The report of the repair, with ``calibration``.
    """

    requested: float | str
    masks: Masks
    evidence_change: float | None = None
    loss_rise: float | None = None
    quality_before: float | None = None
    quality_after: float | None = None
    repaired: Repaired | None = None

    @cached_property
    def layers(self) -> tuple[PrunedLayer, ...]:
        """One row per parameter."""
        return tuple(PrunedLayer(n, tuple(m.shape), m.numel(), int(m.sum())) for n, m in self.masks.items())

    @property
    def total(self) -> int:
        """Number of prunable weights."""
        return self.masks.total

    @property
    def kept(self) -> int:
        """Number of kept weights."""
        return self.masks.kept

    @property
    def achieved(self) -> float:
        """The sparsity reached over the prunable weights."""
        return self.masks.sparsity

    def __str__(self) -> str:
        width = max(9, *(len(layer.name) for layer in self.layers))
        rows = [f"{'parameter':<{width}}  {'shape':>16}  {'weights':>10}  {'kept':>10}  sparsity"]
        for layer in self.layers:
            shape = "×".join(map(str, layer.shape))
            rows.append(
                f"{layer.name:<{width}}  {shape:>16}  {layer.total:>10}  {layer.kept:>10}  {layer.sparsity:8.4f}"
            )
        rows.append(f"{'all':<{width}}  {'':>16}  {self.total:>10}  {self.kept:>10}  {self.achieved:8.4f}")
        asked = self.requested if isinstance(self.requested, str) else f"{self.requested:.4f}"
        rows.append(f"requested {asked}, achieved {self.achieved:.4f}")
        if self.evidence_change is not None and self.loss_rise is not None:
            rows.append(f"log evidence {self.evidence_change:+.2f} nats, expected loss {self.loss_rise:+.3f}")
        if self.quality_before is not None and self.quality_after is not None:
            rows.append(f"validation quality {self.quality_before:.4f} before, {self.quality_after:.4f} after")
        if self.repaired is not None:
            unrepaired = self.repaired.unrepaired
            rows.append(
                f"repaired the weights of {len(self.repaired.layers)} layers"
                + ("; not repaired:" if unrepaired else "")
            )
            rows += [f"  {name}: {reason}" for name, reason in unrepaired.items()]
        return "\n".join(rows)


def prune(
    model: nn.Module,
    scores: Mapping[str, Tensor] | None,
    sparsity: float | str | None = None,
    *,
    scope: str = "global",
    cap: float = 1.0,
    minimum: int = 0,
    posterior: PosteriorLike | None = None,
    nats: float = DEFAULT_NATS,
    budget: float | None = None,
    valid: Iterable[Any] | Quality | None = None,
    max_drop: float | None = None,
    calibration: Iterable[Any] | None = None,
    passes: int = 0,
    forward: Forward | None = None,
    targets: Targets | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Pruned:
    """Set the weights with the lowest scores to zero. With ``calibration``, the kept weights are repaired.

    Example:
        >>> from shaver.criteria import score
        >>> model = nn.Linear(10, 10)
        >>> pruned = prune(model, score(model, "magnitude"), 0.9)
        >>> pruned.achieved, int((model.weight != 0).sum())
        (0.9, 10)

    On an error the model does not change.

    Args:
        model: The network; its weights are changed in place.
        scores: From :func:`shaver.score`. With ``"auto"`` the evidence ranks the weights, and the scores only name the
            parameters that may be pruned (``None``: all prunable ones).
        sparsity: The share of the scored weights to remove, in [0, 1). ``"auto"`` removes weights that bring too
            little evidence, and needs ``posterior``. With ``max_drop``: the highest share to try (default: no limit).
        scope: ``"global"`` ranks all weights together. ``"layer"`` removes the same share of each parameter. ``"2:4"``
            (or another N:M) keeps N of every M consecutive weights along the input dimension, without ``sparsity``.
        cap: The largest share that any parameter may lose. More is removed elsewhere instead (not with ``"auto"``).
        minimum: Each parameter keeps at least this many weights.
        posterior: Needed for ``"auto"``. With it, every report has the effect of the removal on evidence and loss.
        nats: For ``"auto"``: a weight is kept if it brings at least this much evidence, in nats.
        budget: For ``"auto"``: the largest expected rise of the loss, as a share of ½Σγ, the rise that the posterior
            itself expects. Default: 0.05, and at most 0.02 nats per sample.
        valid: Validation batches, whose accuracy is measured, or ``quality(model) -> float``, higher is better.
        max_drop: Find the highest sparsity that loses at most this much quality (0.01 is one point of accuracy).
        calibration: Batches of unlabelled inputs: a few hundred samples help, 1,000 to 4,000 are better. Of a loader,
            the first 4,096 are read. The network is pruned in rounds and repaired after each (:func:`shaver.repair`);
            with ``"auto"`` and N:M it is pruned at once and repaired once.
        passes: Passes over the calibration data in which all layers are fitted together after the last round. They
            help most at high sparsity; see :func:`shaver.repair`.
        forward: ``forward(model, batch)`` for validation and calibration batches of another layout.
        targets: ``targets(batch)`` for validation batches.
        progress: ``progress(done, total)`` is called after each layer of each round of a repair, and after each pass.
            With ``max_drop``, the number of rounds is not known, and it counts within each.

    Raises:
        ValueError: An option is out of range or missing, or scores do not fit the model or are NaN.
    """
    check_network(model, "prune")
    check_functions(forward=forward, targets=targets, progress=progress, valid=valid if callable(valid) else None)
    check_passes(passes, calibration)
    check_posterior(posterior)
    if scores is not None:
        check_fit(model, scores)
    names = list(scores if scores is not None else prunable(model))
    if not names:
        raise ValueError(f"{type(model).__name__} has no prunable weights.")
    if (valid is None) != (max_drop is None):
        raise ValueError("max_drop needs validation data, valid=…, and valid is only used with max_drop=….")
    if scope not in ("global", "layer") and pattern_of(scope) is None:
        raise ValueError(f"unknown scope {scope!r}. Valid: 'global', 'layer', or N:M such as '2:4'.")
    worth = None if posterior is None else weigh(model, posterior, names)
    ranking = partial(Ranking, scope=scope, cap=cap, minimum=minimum)
    has_limits = check_limits(cap, minimum)
    measured: dict[str, float] = {}
    requested: float | str
    rounds = None
    if calibration is not None:
        rounds = Rounds(model, calibration, ranking, passes=passes, forward=forward, progress=progress)
    with nullcontext() if rounds is None else rounds:
        if (pattern := pattern_of(scope)) is not None:
            if has_limits or max_drop is not None:
                raise ValueError(f"scope {scope!r} fixes the sparsity: leave out cap, minimum and max_drop.")
            requested, masks = scope, _pattern_masks(model, _given(scores), sparsity, *pattern)
        elif max_drop is not None and valid is not None:
            if sparsity == "auto":
                raise ValueError('sparsity="auto" needs no validation data; leave out max_drop, or give a share.')
            check_number("max_drop, how much quality may be lost,", max_drop, least=0)
            given, quality = _given(scores), quality_on(valid, forward, targets)
            limit = 1.0 if sparsity is None else check_sparsity(sparsity)
            if rounds is None:
                masks, before, after = highest_sparsity(model, ranking(given), quality, max_drop=max_drop, limit=limit)
            else:
                masks, before, after = rounds.highest(given, quality, max_drop=max_drop, limit=limit)
            measured = {"quality_before": before, "quality_after": after}
            requested = f"a drop of at most {max_drop:g}"
        elif sparsity == "auto":
            if getattr(posterior, "fixed", False):
                raise ValueError(_NOT_LEARNED)
            if worth is None:
                raise ValueError(
                    'sparsity="auto" weighs the evidence: pass posterior=… (spam.posterior after training).'
                )
            if scope != "global":
                raise ValueError(f'sparsity="auto" judges each weight by itself; leave out scope={scope!r}.')
            protected = [ranking({n: gain}) for n, gain in worth.gains.items()] if has_limits else []
            requested, masks = "auto", _automatic_masks(worth.kept(nats, budget), protected)
        elif sparsity is None:
            raise ValueError('say how much to remove: sparsity=0.95, sparsity="auto", scope="2:4" or max_drop=….')
        else:
            requested, given = check_sparsity(sparsity), _given(scores)
            masks = ranking(given).at(requested) if rounds is None else rounds.prune(given, requested)
        if worth is not None:
            measured |= worth.of_removal(masks)
        if rounds is None:
            masks.apply_(model)
        elif requested in (scope, "auto"):
            rounds.apply(masks)
    return Pruned(requested, masks, repaired=None if rounds is None else rounds.report, **measured)


def _given(scores: Mapping[str, Tensor] | None) -> Mapping[str, Tensor]:
    if scores is None:
        raise ValueError('scores are missing; only sparsity="auto" can do without them. See shaver.score.')
    return scores


def check_fit(model: nn.Module, scores: Mapping[str, Tensor]) -> None:
    """Raise ``ValueError`` for scores that are NaN or belong to another model."""
    if not isinstance(scores, Mapping):
        raise TypeError(f"scores are a dict of tensors by parameter name, not a {type(scores).__name__}.")
    check_scores(scores)
    known = dict(model.named_parameters())
    for name, values in scores.items():
        if name not in known:
            raise ValueError(
                f"there are scores for {name!r}, which {type(model).__name__} does not have: they belong to another "
                "model."
            )
        if known[name].shape != values.shape:
            raise ValueError(
                f"the scores of {name!r} have shape {tuple(values.shape)}, the parameter "
                f"{tuple(known[name].shape)}: they belong to another model."
            )


def pattern_of(scope: object) -> tuple[int, int] | None:
    """N and M of a scope such as ``"2:4"``; ``None`` for another scope."""
    found = re.fullmatch(r"(\d+):(\d+)", scope) if isinstance(scope, str) else None
    return None if found is None else (int(found[1]), int(found[2]))


def _pattern_masks(
    model: nn.Module, scores: Mapping[str, Tensor], sparsity: float | str | None, kept: int, of: int
) -> Masks:
    """Keep N of every M consecutive weights."""
    if not 0 < kept < of:
        raise ValueError(f"scope '{kept}:{of}' must keep fewer than {of} weights, and at least one, as '2:4' does.")
    if sparsity is not None and (isinstance(sparsity, str) or abs(check_sparsity(sparsity) - (1 - kept / of)) > 1e-9):
        raise ValueError(
            f"scope '{kept}:{of}' fixes the sparsity at {1 - kept / of:g}; leave out sparsity={sparsity!r}."
        )
    return n_of_m(scores, kept, of, {name: input_dim(model, name) for name in scores})


def _automatic_masks(kept: Mapping[str, Tensor], rankings: Iterable[Ranking]) -> Masks:
    """Masks of the weights that bring enough evidence, and of the best of each layer that the limits protect."""
    masks = dict(kept)
    for ranking in rankings:
        for name, best in ranking.removing(round(ranking.limit * ranking.total)).items():
            masks[name] = masks[name] | best
    if empty := [name for name, mask in masks.items() if not bool(mask.any())]:
        warnings.warn(
            f'sparsity="auto" removes all of {", ".join(empty)}: nothing passes through it any more. Was δ learned '
            '(method="spam"), and long enough? max_drop= finds a sparsity by validation data.',
            stacklevel=3,
        )
    return Masks(masks)
