"""The Laplace posterior N(θ*, (H + δ)⁻¹) and the evidence of the prior.

log p(D|δ) ≈ log p(D|θ*) − ½ θ*ᵀ δ θ* + ½ Σ log δ − ½ log |H + δ|
"""

import math
import os
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn

from shaver import io
from shaver.curvature.blocks import Curvature, at_least_float32, summed
from shaver.evidence.basis import Basis, make_bases
from shaver.evidence.prediction import METHODS, Prediction, draws, linearised, sampled
from shaver.likelihoods import Likelihood, get_likelihood
from shaver.naming import check_name, check_number, shown
from shaver.priors import Prior, broadcasts

#: Prior precisions: one number, one number or tensor per parameter, or a prior.
Precision = float | Tensor | Mapping[str, float | Tensor] | Prior


class Posterior:
    """The posterior of the weights, given the data and the prior: Gaussian around θ with precision P = H/T + δ.

    Example:
        >>> posterior = Posterior(curvature, prior, model)
        >>> posterior.precision()["fc1.weight"]          # P_pp, for pruning
        >>> posterior.log_evidence, posterior.effective_parameters
        >>> posterior.save("posterior.safetensors")
        >>> posterior.predict(x).mean                    # class probabilities that include the uncertainty

    δ is the prior's value at construction; later updates of the prior do not change it. θ and H are not copied:
    quantities computed after further training use the new θ and H.

    Args:
        curvature: H of every trainable parameter, and the log likelihood.
        prior: A prior, one precision, or one precision (number or broadcastable tensor) per parameter.
        theta: The weights by name, at which H was estimated, or the model that has them.
        temperature: T: H and the log likelihood count 1/T times.
        model: The network for :meth:`predict`. Not needed if ``theta`` is the model.
        likelihood: For :meth:`predict`: ``"classification"``, ``"regression"`` or your own.

    Attributes:
        fixed: Whether δ was given as one number, and so not learned.
    """

    def __init__(
        self,
        curvature: Curvature,
        prior: Precision,
        theta: Mapping[str, Tensor] | nn.Module,
        temperature: float = 1.0,
        *,
        model: nn.Module | None = None,
        likelihood: str | Likelihood = "classification",
    ) -> None:
        if isinstance(theta, nn.Module):
            model = theta if model is None else model
            theta = dict(theta.named_parameters())
        if not isinstance(curvature, Curvature):
            raise TypeError(f"curvature is what shaver.curvature.estimate returns, not {shown(curvature)}.")
        if not isinstance(theta, Mapping):
            raise TypeError(f"the weights are a network or a dict of tensors by name, not {shown(theta)}.")
        self.model, self.likelihood = model, get_likelihood(likelihood)
        self.curvature = curvature
        self.temperature = check_number("temperature", temperature, least=0, above=True)
        self.theta = {name: weights_of(theta, name, block.shape) for name, block in curvature}
        self.fixed = not isinstance(prior, Prior | Mapping)
        self._prior: Prior | dict[str, Tensor]
        if isinstance(prior, Prior):
            _same_names(prior.names, curvature, "the prior")
            self._prior = prior.snapshot()
        else:
            self._prior = _precisions(prior, curvature, self.theta)

    def delta_of(self, name: str) -> Tensor:
        """δ of one parameter, broadcastable to its shape."""
        return self._prior.delta_of(name) if isinstance(self._prior, Prior) else self._prior[name]

    def delta(self) -> dict[str, Tensor]:
        """δ of every parameter, each broadcastable to the parameter's shape."""
        return {name: self.delta_of(name) for name in self.theta}

    def precision(self) -> dict[str, Tensor]:
        """P_pp = H_pp/T + δ_p, exact for both structures, each shaped like its parameter."""
        diagonal = self.curvature.diagonal()
        return {name: torch.add(self.delta_of(name), diagonal[name], alpha=1 / self.temperature) for name in self.theta}

    def gamma(self) -> dict[str, Tensor]:
        """γ_p = 1 − δ_p Σ_pp: near 1 if the data determine a weight, near 0 if the prior does."""
        return {
            name: basis.gamma(delta := self.delta_of(name), basis.project(delta))
            for name, basis in self.bases().items()
        }

    @property
    def log_det(self) -> float:
        """log |H/T + δ|."""
        return sum(float(b.log_det(b.project(self.delta_of(name)))) for name, b in self.bases().items())

    @property
    def effective_parameters(self) -> float:
        """Σ γ_p: how many weights the data determine."""
        return sum(float(b.effective(b.project(self.delta_of(name)))) for name, b in self.bases().items())

    @property
    def log_evidence(self) -> float:
        """The Laplace approximation of log p(D|δ)."""
        value = self.curvature.log_likelihood / self.temperature
        if not math.isfinite(value):
            raise FloatingPointError(f"the log likelihood is {value}; training has diverged.")
        for name, basis in self.bases().items():
            delta = self.delta_of(name)
            term = float(occam(basis, delta, basis.project(delta), self.theta[name]))
            if not math.isfinite(term):
                raise FloatingPointError(
                    f"the evidence of {name!r} is {term}; its weights or precisions have diverged."
                )
            value += term
        return value

    def relevance(self) -> float:
        """The share of weights with S_p = P_pp θ_p² > 1, for which the data outweigh the prior."""
        relevant = sum(int((p * self.theta[name].square() > 1).sum()) for name, p in self.precision().items())
        return relevant / sum(theta.numel() for theta in self.theta.values())

    def sample(self, count: int = 1, *, seed: int = 0) -> dict[str, Tensor]:
        """Weights drawn from the posterior: parameter name → ``(count, *shape)``.

        Example:
            >>> weights = posterior.sample(20)
            >>> torch.func.functional_call(model, {name: drawn[0] for name, drawn in weights.items()}, (x,))
        """
        drawn = list(draws(self, count, seed))
        return {name: torch.stack([weights[name] for weights in drawn]) for name in self.theta}

    def predict(
        self,
        x: Any,
        *,
        method: str = "linearised",
        samples: int = 30,
        seed: int = 0,
        model: nn.Module | None = None,
        likelihood: str | Likelihood | None = None,
    ) -> Prediction:
        """Predict outputs and their uncertainty, given the uncertainty of the weights.

        ``"linearised"`` costs one Jacobian per sample: K backward passes for K outputs. It is the better choice for
        curvature from the GGN or MC, because their posterior is that of the linearised network. ``"sampled"`` costs
        ``samples`` forward passes and works with every network.

        Example:
            >>> probabilities = spam.posterior.predict(x).mean

        Args:
            x: Inputs: a tensor, a tuple of tensors, or a dict of the model's keyword arguments.
            method: ``"linearised"`` or ``"sampled"``.
            samples: Number of sampled networks, for ``"sampled"``.
            seed: Seed of the sampled networks.
            model: The network. Needed if the posterior was loaded from a file or created without its model.
            likelihood: Replaces the posterior's own likelihood.
        """
        check_name("method", method, METHODS)
        model = self.model if model is None else model
        if model is None:
            raise ValueError(
                "this posterior has no network: call posterior.predict(x, model=model), or create it as "
                "Posterior(curvature, prior, model)."
            )
        likelihood = self.likelihood if likelihood is None else get_likelihood(likelihood)
        if method == "sampled":
            return sampled(self, model, x, likelihood, samples, seed)
        return linearised(self, model, x, likelihood)

    def __repr__(self) -> str:
        weights = sum(theta.numel() for theta in self.theta.values())
        ends = torch.tensor([[float(d.min()), float(d.max())] for d in self.delta().values() if d.numel()])
        return (
            f"Posterior of {weights:,} weights in {len(self.theta)} parameters\n"
            f"  curvature   {self.curvature.structure}, {self.curvature.source}, {self.curvature.data_size:,} samples"
            + (f", temperature {self.temperature:g}" if self.temperature != 1 else "")
            + f"\n  precision δ {ends[:, 0].min():.3g} to {ends[:, 1].max():.3g}"
            f"\n  relevant    {100 * self.relevance():.2f}% of the weights (P θ² > 1)"
        )

    def state_dict(self) -> dict[str, object]:
        """Curvature, δ, θ and temperature: tensors and plain values, no code."""
        return {
            "curvature": self.curvature.state_dict(),
            "delta": self.delta(),
            "theta": dict(self.theta),
            "temperature": self.temperature,
            "fixed": self.fixed,
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> "Posterior":
        """Rebuild from :meth:`state_dict`."""
        curvature = Curvature.from_state_dict(state["curvature"])
        posterior = cls(curvature, state["delta"], state["theta"], state["temperature"])
        posterior.fixed = bool(state.get("fixed", False))
        return posterior

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file, atomically."""
        io.save_state(path, self.state_dict())

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Posterior":
        """Read what :meth:`save` wrote."""
        state = io.load_state(path)
        if not (isinstance(state, dict) and state.keys() >= {"curvature", "delta", "theta", "temperature"}):
            raise ValueError(f"{path} holds no posterior; another program wrote it.")
        return cls.from_state_dict(state)

    def bases(self) -> dict[str, Basis]:
        """H/T of each parameter in the basis where it is diagonal."""
        return make_bases(self.curvature, self.temperature)


def log_evidence(
    model: nn.Module, curvature: Curvature, *, prior_precision: Precision, temperature: float = 1.0
) -> float:
    """The Laplace log evidence of a model under a prior.

    Example:
        >>> curvature = shaver.curvature.estimate(model, loader)
        >>> shaver.log_evidence(model, curvature, prior_precision=1.0)

    Args:
        model: The network at the weights where ``curvature`` was estimated.
        curvature: H and the data's log likelihood.
        prior_precision: One δ, a dict of numbers or tensors by parameter name, or a prior.
        temperature: T: the data count 1/T times.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(f"log_evidence takes a network, a torch.nn.Module, not {shown(model)}.")
    return Posterior(curvature, prior_precision, model, temperature).log_evidence


def occam(basis: Basis, delta: Tensor, projected: Tensor, theta: Tensor) -> Tensor:
    """One parameter's share of the evidence, ½ [Σ log δ − θᵀδθ − log|H + δ|], as a float64 scalar."""
    repeats = theta.numel() // max(delta.numel(), 1)
    log_prior = summed(torch.log, delta) * repeats
    scatter = summed(lambda weights, precision: weights.square() * precision, theta, delta)
    return 0.5 * (log_prior - scatter - basis.log_det(projected))


def weights_of(theta: Mapping[str, Tensor], name: str, shape: torch.Size) -> Tensor:
    """The weights that belong to a block, detached."""
    if name not in theta:
        raise ValueError(f"the curvature has a block for {name!r}, which is not among the weights: {_few(theta)}.")
    weights = theta[name].detach()
    if weights.shape != shape:
        raise ValueError(
            f"{name!r} has shape {tuple(weights.shape)}, but its curvature has {tuple(shape)}; estimate the curvature "
            "again after changing the model."
        )
    return at_least_float32(weights)


def _same_names(names: list[str], curvature: Curvature, what: str) -> None:
    missing = [name for name in curvature.blocks if name not in names]
    extra = [name for name in names if name not in curvature.blocks]
    if missing or extra:
        sides = ([f"{what} lacks {_few(missing)}"] if missing else []) + (
            [f"the curvature lacks {_few(extra)}"] if extra else []
        )
        raise ValueError(f"{what} and the curvature have different parameters: {' and '.join(sides)}.")


def _precisions(
    prior: float | Tensor | Mapping[str, float | Tensor], curvature: Curvature, theta: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """The user's numbers and tensors as one positive tensor per parameter."""
    given = prior if isinstance(prior, Mapping) else dict.fromkeys(curvature.blocks, prior)
    _same_names(list(given), curvature, "the prior precision")
    result = {}
    for name, block in curvature:
        value = given[name]
        is_real = not value.is_complex() if isinstance(value, Tensor) else isinstance(value, Real)
        if not is_real or isinstance(value, bool):
            raise TypeError(
                f"the precision of {name!r} must be a number or a tensor, not {shown(value)}; a dict of these by "
                "parameter name, or a prior from shaver.priors.make_prior, gives each parameter its own."
            )
        delta = torch.as_tensor(given[name], dtype=theta[name].dtype, device=theta[name].device).detach()
        if not broadcasts(delta.shape, block.shape):
            raise ValueError(
                f"the precision of {name!r} has shape {tuple(delta.shape)}, which does not broadcast to the "
                f"parameter's {tuple(block.shape)}."
            )
        if not bool(((delta > 0) & delta.isfinite()).all()):
            raise ValueError(f"the precision of {name!r} is not positive and finite everywhere: {delta!r}.")
        result[name] = delta
    return result


def _few(names: Iterable[str]) -> str:
    listed = list(names)
    return ", ".join(map(repr, listed[:3])) + (f" and {len(listed) - 3} more" if len(listed) > 3 else "")
