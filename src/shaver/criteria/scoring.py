"""``score``: one number per prunable weight. The lowest are pruned first."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from shaver.batches import Forward, Targets, check_batches, check_network, forward_of, targets_of
from shaver.criteria.prunable_weights import Rule, prunable
from shaver.criteria.registry import Given, PosteriorLike, Scores, check_posterior, get
from shaver.curvature.capture import undisturbed
from shaver.likelihoods import Likelihood, get_likelihood
from shaver.naming import check_count, check_flags, check_functions
from shaver.priors import broadcasts


def score(
    model: nn.Module,
    criterion: str,
    *,
    posterior: PosteriorLike | None = None,
    batches: Iterable[Any] | None = None,
    likelihood: str | Likelihood = "classification",
    seed: int = 0,
    forward: Forward | None = None,
    targets: Targets | None = None,
    rule: Rule | None = None,
    exclude_first: bool = False,
    exclude_last: bool = False,
    **options: Any,
) -> Scores:
    """Score every prunable weight; :func:`shaver.prune` removes the lowest.

    Example:
        >>> scores = score(nn.Linear(3, 2), "magnitude")
        >>> {name: tuple(tensor.shape) for name, tensor in scores.items()}
        {'weight': (2, 3)}

    The model is scored in eval mode and left unchanged: weights, buffers, gradients, mode, and the state of the global
    random generator.

    Args:
        model: The network.
        criterion: ``"opd"``, ``"obd"``, ``"magnitude"``, ``"snip"``, ``"grasp"``, ``"synflow"``, ``"wanda"``,
            ``"random"`` or a registered one; ``shaver.criteria.needs(criterion)`` says what it needs.
        posterior: The posterior, for OPD (optimal posterior damage) and OBD (optimal brain damage).
        batches: The data for SNIP, GraSP and Wanda. SynFlow uses only the shape of the inputs.
        likelihood: The loss of SNIP and GraSP.
        seed: Seed of ``"random"``.
        forward: ``forward(model, batch)`` for batches of another layout.
        targets: ``targets(batch)`` for batches of another layout.
        rule: Which weights are prunable; see :func:`shaver.criteria.prunable`.
        exclude_first: Do not score the first prunable weight.
        exclude_last: Do not score the last prunable weight.
        **options: Passed to the criterion, such as ``rounds=1`` for SynFlow.

    Returns:
        One score tensor per prunable parameter, shaped like it.

    Raises:
        ValueError: The criterion is unknown, something it needs is missing, or its scores are not usable.
    """
    check_network(model, "score")
    check_count("seed", seed, least=0)
    check_functions(forward=forward, targets=targets, rule=rule)
    check_flags(exclude_first=exclude_first, exclude_last=exclude_last)
    check_posterior(posterior)
    chosen = get(criterion)
    chosen.require(posterior, batches, options)
    if batches is not None:
        check_batches(batches, "batches")
    if isinstance(batches, Iterator):  # a criterion may read the data twice
        batches = list(batches)
    given = Given(
        model=model,
        weights=prunable(model, rule, exclude_first=exclude_first, exclude_last=exclude_last),
        seed=seed,
        likelihood=get_likelihood(likelihood),
        forward=forward or forward_of,
        targets=targets or targets_of,
        _posterior=posterior,
        _batches=batches,
    )
    with undisturbed(model):
        scores = chosen.function(given, **options)
    return Scores(_checked(criterion, given.weights, scores), chosen.degree)


def of_weight(values: Mapping[str, Tensor], name: str, weight: Tensor, what: str, *, broadcast: bool = False) -> Tensor:
    """``values[name]`` of a posterior, or an error that says why these values (``what``) do not fit the weight.

    With ``broadcast`` any shape that broadcasts to the weight's shape fits.
    """
    if name not in values:
        raise ValueError(
            f"the posterior has no {what} for the weight {name!r}: it belongs to another model, or the weight was "
            "frozen; rule=lambda name, parameter: parameter.requires_grad scores only the trained weights."
        )
    found = values[name]
    if found.shape != weight.shape and not (broadcast and broadcasts(found.shape, weight.shape)):
        raise ValueError(
            f"the posterior's {what} for {name!r} has shape {tuple(found.shape)}, the weight {tuple(weight.shape)}: "
            "the posterior belongs to another model, or the model has changed since."
        )
    return found


def _checked(criterion: str, weights: Mapping[str, nn.Parameter], scores: Mapping[str, Tensor]) -> dict[str, Tensor]:
    if not isinstance(scores, Mapping):
        raise TypeError(
            f"criterion {criterion!r} returned {scores!r}; it must return a dict with a score tensor for each of "
            "given.weights."
        )
    result = {}
    for name, weight in weights.items():
        if name not in scores:
            raise ValueError(
                f"criterion {criterion!r} returned no score for {name!r}; it must score each of given.weights."
            )
        if scores[name].shape != weight.shape:
            raise ValueError(
                f"criterion {criterion!r} returned scores of shape {tuple(scores[name].shape)} for {name!r}, which has "
                f"shape {tuple(weight.shape)}; do the posterior and the options belong to this model?"
            )
        if bool(scores[name].sum().isnan()) and bool(scores[name].isnan().any()):  # the sum needs no memory
            raise ValueError(
                f"criterion {criterion!r} returned {int(scores[name].isnan().sum())} NaN scores for {name!r}; the "
                "weights, the data or the posterior hold NaN or infinity."
            )
        result[name] = scores[name].detach()
    return result
