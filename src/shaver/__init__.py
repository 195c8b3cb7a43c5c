"""Bayesian sparsification of neural networks: train with the evidence, prune by the posterior.

Names are imported when they are first used, so that ``import shaver`` and the command line start at once.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

_NAMES = {
    "Diverged": "shaver.training",
    "History": "shaver.training",
    "Posterior": "shaver.evidence",
    "SpaM": "shaver.spam",
    "compact": "shaver.structure",
    "fit": "shaver.training",
    "load": "shaver.files",
    "log_evidence": "shaver.evidence",
    "prune": "shaver.pruning",
    "recalibrate": "shaver.repairing",
    "repair": "shaver.repairing",
    "save": "shaver.files",
    "score": "shaver.criteria",
    "sparse_inference": "shaver.pruning",
}

__all__ = [
    "Diverged",
    "History",
    "Posterior",
    "SpaM",
    "__version__",
    "compact",
    "criteria",
    "curvature",
    "data",
    "evidence",
    "files",
    "fit",
    "integrations",
    "io",
    "lab",
    "likelihoods",
    "load",
    "log_evidence",
    "measure",
    "priors",
    "prune",
    "pruning",
    "recalibrate",
    "repair",
    "repairing",
    "save",
    "score",
    "settings",
    "sparse_inference",
    "structure",
    "testing",
    "training",
    "zoo",
]

if TYPE_CHECKING:
    from shaver import (
        criteria,
        curvature,
        data,
        evidence,
        files,
        integrations,
        io,
        lab,
        likelihoods,
        measure,
        priors,
        pruning,
        repairing,
        settings,
        structure,
        testing,
        training,
        zoo,
    )
    from shaver.criteria import score
    from shaver.evidence import Posterior, log_evidence
    from shaver.files import load, save
    from shaver.pruning import prune, sparse_inference
    from shaver.repairing import recalibrate, repair
    from shaver.spam import SpaM
    from shaver.structure import compact
    from shaver.training import Diverged, History, fit


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module 'shaver' has no attribute {name!r}")
    value = getattr(import_module(_NAMES[name]), name) if name in _NAMES else import_module(f"shaver.{name}")
    globals()[name] = value  # the next access is an ordinary one
    return value


def __dir__() -> list[str]:
    return __all__
