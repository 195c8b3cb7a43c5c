"""The posterior of the weights, the evidence of the prior, and learning δ and the noise from the evidence."""

from shaver.evidence.improve import fit_prior, improve, optimal_precision, shrink_factor
from shaver.evidence.noise import improve_noise
from shaver.evidence.posterior import Posterior, log_evidence
from shaver.evidence.prediction import Prediction

__all__ = [
    "Posterior",
    "Prediction",
    "fit_prior",
    "improve",
    "improve_noise",
    "log_evidence",
    "optimal_precision",
    "shrink_factor",
]
