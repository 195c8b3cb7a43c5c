"""The evidence for a prior, the posterior under it, and how δ and the noise are learned from it."""

from shaver.evidence.improve import improve, optimal_precision, shrink_factor
from shaver.evidence.noise import improve_noise
from shaver.evidence.posterior import Posterior, log_evidence
from shaver.evidence.prediction import Prediction

__all__ = ["Posterior", "Prediction", "improve", "improve_noise", "log_evidence", "optimal_precision", "shrink_factor"]
