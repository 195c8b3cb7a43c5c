"""The noise of a regression, learned from the evidence like the prior."""

import math

from shaver.curvature.blocks import Curvature
from shaver.likelihoods import Regression


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
