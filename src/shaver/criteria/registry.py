"""The register of pruning criteria. A criterion is one function that returns a score per weight."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from shaver.batches import Forward, Targets
from shaver.likelihoods import Likelihood
from shaver.naming import check_name, shown

#: What a criterion may need.
NEEDS = ("posterior", "batches", "example")

_HOW = {
    "posterior": "posterior=… (spam.posterior after training, or one from a curvature estimate)",
    "batches": "batches=… (an iterable of (inputs, targets), such as a DataLoader)",
    "example": "example=… (one input) or batches=… (such as a DataLoader)",
}


class HasDiagonal(Protocol):
    """The part of a curvature that a criterion needs."""

    def diagonal(self) -> dict[str, Tensor]:
        """H_pp by parameter name."""
        ...


def check_posterior(posterior: object) -> None:
    """Refuse what is neither a posterior nor None."""
    if posterior is not None and not all(hasattr(posterior, name) for name in ("curvature", "precision", "delta")):
        raise TypeError(f"posterior is a shaver.Posterior, such as spam.posterior, not {shown(posterior)}.")


class PosteriorLike(Protocol):
    """The part of a Laplace posterior that criteria and pruning need; :class:`shaver.Posterior` has it."""

    @property
    def curvature(self) -> HasDiagonal:
        """H, the curvature of the negative log likelihood summed over the data."""
        ...

    def precision(self) -> dict[str, Tensor]:
        """The diagonal of H + δ by parameter name, shaped like the parameters."""
        ...

    def delta(self) -> Mapping[str, Tensor]:
        """The prior precision δ by parameter name, broadcastable to the parameters."""
        ...


@dataclass(frozen=True)
class Given:
    """Everything a criterion can use. Only what it declared in ``needs`` is guaranteed to be available.

    Attributes:
        model: The network, in eval mode while it is scored.
        weights: The prunable parameters by name; a criterion returns one score tensor per parameter.
        seed: For criteria that draw random numbers.
        likelihood: Turns outputs and targets into a loss.
        forward: ``forward(model, batch)`` returns the outputs.
        targets: ``targets(batch)`` returns the targets.
    """

    model: nn.Module
    weights: Mapping[str, nn.Parameter]
    seed: int
    likelihood: Likelihood
    forward: Forward
    targets: Targets
    _posterior: PosteriorLike | None = None
    _batches: Iterable[Any] | None = None

    @property
    def posterior(self) -> PosteriorLike:
        """The posterior; available if the criterion declares ``needs=("posterior",)``."""
        if self._posterior is None:
            raise ValueError(f"no posterior was given; pass {_HOW['posterior']}.")
        return self._posterior

    def batches(self) -> Iterable[Any]:
        """The data, from the start. A shuffling loader gives the same order on each call."""
        if self._batches is None:
            raise ValueError(f"no data were given; pass {_HOW['batches']}.")
        empty = True
        with torch.random.fork_rng(devices=[]):  # a loader draws its order from the global generator
            for batch in self._batches:
                empty = False
                yield batch
        if empty:
            raise ValueError("batches is empty, but this criterion needs data: pass at least one batch.")

    def loss(self, batch: Any) -> tuple[Tensor, int]:
        """The negative log likelihood of one batch, summed over its samples, and the number of samples."""
        outputs, targets = self.forward(self.model, batch), self.targets(batch)
        self.likelihood.check(outputs, targets)
        nll = self.likelihood.nll(outputs, targets)
        return nll.sum(), len(nll)


class Scores(dict[str, Tensor]):
    """One score tensor per prunable parameter, shaped like it.

    Attributes:
        degree: The power of the weight in the scores: 1 for |θ|, 2 for P θ². Repair uses it to adjust the scores to
            the repaired weights.
    """

    def __init__(self, scores: Mapping[str, Tensor], degree: int = 1) -> None:
        super().__init__(scores)
        self.degree = degree


CriterionFunction = Callable[..., dict[str, Tensor]]


@dataclass(frozen=True)
class Criterion:
    """A registered criterion.

    Attributes:
        name: The name that a user passes.
        function: ``function(given, **options) -> {name: score}``.
        needs: A subset of ``("posterior", "batches", "example")``; batches serve as an example too.
        degree: The power of the weight in the score: 1 for |θ|, 2 for P θ².
    """

    name: str
    function: CriterionFunction
    needs: tuple[str, ...]
    degree: int = 1

    def require(self, posterior: object, batches: object, options: Mapping[str, object]) -> None:
        """Raise ``ValueError`` if something that the criterion needs is missing."""
        example = options.get("example")
        given = {"posterior": posterior, "batches": batches, "example": batches if example is None else example}
        missing = [_HOW[need] for need in self.needs if given[need] is None]
        if missing:
            raise ValueError(f"criterion {self.name!r} needs {' and '.join(missing)}.")


_REGISTER: dict[str, Criterion] = {}


def criterion(
    name: str, *, needs: Iterable[str] = (), degree: int = 1
) -> Callable[[CriterionFunction], CriterionFunction]:
    """Register a function as a pruning criterion. The weights with the lowest scores are pruned first.

    Example:
        >>> @criterion("prior-energy", needs=["posterior"])
        ... def prior_energy(given):
        ...     delta = given.posterior.delta()
        ...     return {name: delta[name] * weight.square() for name, weight in given.weights.items()}
        >>> needs("prior-energy")
        ('posterior',)

    ``shaver.testing.check_criterion("prior-energy")`` tests it.

    Raises:
        ValueError: The name is taken by another function, or a need is unknown.
    """
    if isinstance(needs, str):
        raise TypeError(f"needs must be a list of names, needs=[{needs!r}], not {needs!r}.")
    checked = tuple(check_name("need of a criterion", need, NEEDS) for need in needs)

    def decorate(function: CriterionFunction) -> CriterionFunction:
        old = _REGISTER.get(name)
        if old is not None and (old.function.__module__, old.function.__qualname__) != (
            function.__module__,
            function.__qualname__,
        ):
            raise ValueError(f"the criterion {name!r} exists already ({old.function.__module__}); choose another name.")
        _REGISTER[name] = Criterion(name, function, checked, degree)
        return function

    return decorate


def get(name: str) -> Criterion:
    """The criterion registered under ``name``."""
    return _REGISTER[check_name("criterion", name, names())]


def names() -> list[str]:
    """The names of all criteria, in alphabetical order."""
    return sorted(_REGISTER)


def needs(name: str) -> tuple[str, ...]:
    """What the criterion needs besides the model: a subset of ``("posterior", "batches", "example")``."""
    return get(name).needs
