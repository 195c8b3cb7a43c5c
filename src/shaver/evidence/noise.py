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
    """Set σ² to Σ residual² / (N·D − T·γ), which the evidence asks for, and bring the curvature along.

    The weights that the data determine have absorbed γ residuals' worth of noise; the denominator puts it back.
    Where γ reaches N·D, EM's update Σ residual²/(N·D) + σ²·T·γ/(N·D) is used instead: it never divides by zero.

    Example:
        >>> posterior = improve(prior, curvature, theta)
        >>> improve_noise(likelihood, curvature, posterior.effective_parameters)

    Args:
        likelihood: Its ``noise`` is replaced.
        curvature: Gives Σ residual² by its log likelihood under the old noise. H and the log likelihood are
            rescaled in place to the new noise.
        effective_parameters: Σ γ under the old noise.
        outputs: D, the number of outputs of a sample.
        temperature: The data count 1/T times.

    Returns:
        The new σ².
    """
    old, count = likelihood.noise, curvature.data_size * outputs
    constant = 0.5 * count * math.log(2 * math.pi * old)
    squares = -2 * old * (curvature.log_likelihood + constant)
    if not squares > 0:
        raise FloatingPointError(
            f"the log likelihood {curvature.log_likelihood:g} gives a sum of squared residuals of {squares:g}; it must "
            f"be positive. Are {outputs} outputs a sample and noise {old:g} what the curvature was estimated with?"
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

    Args:
        likelihood: The likelihood in training.

    Attributes:
        outputs: D, the number of outputs of a sample.
    """

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        self.outputs = 1
        self._has_warned = False

    def update(self, curvature: Curvature, effective: Callable[[], float], temperature: float) -> float | None:
        """Improve the noise and bring the curvature along.

        Args:
            curvature: H and the log likelihood under the old noise; rescaled in place.
            effective: Gives Σ γ under the old noise; called where the noise changes only.
            temperature: The data count 1/T times.

        Returns:
            The factor by which H has changed, or None.
        """
        if not isinstance(self.likelihood, Regression):
            return None
        if not math.isfinite(curvature.log_likelihood):
            if not self._has_warned:
                warnings.warn(
                    "the likelihood is not known, so that the noise of the regression stays as it is: differentiate "
                    "spam.loss(outputs, targets) in place of F.mse_loss.",
                    stacklevel=2,
                )
                self._has_warned = True
            return None
        old = self.likelihood.noise
        improve_noise(self.likelihood, curvature, effective(), outputs=self.outputs, temperature=temperature)
        return old / self.likelihood.noise

    def statistics(self) -> dict[str, float]:
        """The noise, where there is one."""
        return {"noise": self.likelihood.noise} if isinstance(self.likelihood, Regression) else {}
