"""The noise of a regression, learned from the evidence like the prior."""

import math
import warnings
from collections.abc import Callable

from shaver.curvature.blocks import Curvature
from shaver.likelihoods import Likelihood, Regression


def improve_noise(
    likelihood: Regression,
    curvature: Curvature,
    effective_parameters: float,
    *,
    outputs: int = 1,
    temperature: float = 1.0,
) -> float:
    """Set σ² to Σ residual² / (N·D − T·γ), which maximises the evidence, and rescale the curvature to it.

    Fitting γ effective parameters makes the residuals too small; the denominator corrects for that. Where T·γ reaches
    N·D, EM's update Σ residual²/(N·D) + σ²·T·γ/(N·D) is used instead, which never divides by zero.

    Example:
        >>> posterior = improve(prior, curvature, theta)
        >>> improve_noise(likelihood, curvature, posterior.effective_parameters)

    Args:
        likelihood: Its ``noise`` is replaced.
        curvature: Its log likelihood under the old noise gives Σ residual². H and the log likelihood are rescaled in
            place to the new noise.
        effective_parameters: Σ γ under the old noise.
        outputs: D, the number of outputs per sample.
        temperature: T: the data count 1/T times.

    Returns:
        The new σ².
    """
    old, count = likelihood.noise, curvature.data_size * outputs
    constant = 0.5 * count * math.log(2 * math.pi * old)
    squares = -2 * old * (curvature.log_likelihood + constant)
    if not squares > 0:
        raise FloatingPointError(
            f"the log likelihood {curvature.log_likelihood:g} gives a sum of squared residuals of {squares:g}; it must "
            f"be positive. Was the curvature estimated with {outputs} outputs per sample and noise {old:g}?"
        )
    known = temperature * effective_parameters
    new = squares / (count - known) if known < count else (squares + old * known) / count
    likelihood.noise = new
    for _, block in curvature:
        block.scale(old / new)
    curvature.log_likelihood = -0.5 * squares / new - 0.5 * count * math.log(2 * math.pi * new)
    return new


class NoiseLearner:
    """Learns a regression's noise while the prior is learned; does nothing for other likelihoods.

    Attributes:
        outputs: D, the number of outputs per sample.
    """

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        self.outputs = 1
        self._has_warned = False

    @property
    def is_learned(self) -> bool:
        """Whether the likelihood has a noise."""
        return isinstance(self.likelihood, Regression)

    def update(self, curvature: Curvature, effective: Callable[[], float], temperature: float) -> float | None:
        """Update the noise and rescale the curvature to it in place.

        ``effective`` returns Σ γ under the old noise and is called only if the noise is learned. The result is the
        factor by which H has changed, or None.
        """
        if not isinstance(self.likelihood, Regression):
            return None
        if not math.isfinite(curvature.log_likelihood):
            if not self._has_warned:
                warnings.warn(
                    "the likelihood is not known, so the regression noise is not learned: call backward on "
                    "spam.loss(outputs, targets) instead of F.mse_loss.",
                    stacklevel=2,
                )
                self._has_warned = True
            return None
        old = self.likelihood.noise
        improve_noise(self.likelihood, curvature, effective(), outputs=self.outputs, temperature=temperature)
        return old / self.likelihood.noise

    def statistics(self) -> dict[str, float]:
        """The noise of a regression; empty for other likelihoods."""
        return {"noise": self.likelihood.noise} if isinstance(self.likelihood, Regression) else {}
