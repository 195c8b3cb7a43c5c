"""Pruning criteria: each is one function that scores every weight. The weights with the lowest scores are pruned first.

Example:
    >>> from shaver import criteria
    >>> criteria.needs("opd"), criteria.needs("snip"), criteria.needs("magnitude")
    (('posterior',), ('batches',), ())
"""

import shaver.criteria.baselines
import shaver.criteria.gradients
import shaver.criteria.opd
import shaver.criteria.synflow
import shaver.criteria.wanda  # noqa: F401
from shaver.criteria.prunable_weights import Rule, prunable
from shaver.criteria.registry import Criterion, Given, PosteriorLike, Scores, criterion, get, names, needs
from shaver.criteria.scoring import score

__all__ = [
    "Criterion",
    "Given",
    "PosteriorLike",
    "Rule",
    "Scores",
    "criterion",
    "get",
    "names",
    "needs",
    "prunable",
    "score",
]
