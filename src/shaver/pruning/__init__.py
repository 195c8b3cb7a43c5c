"""Pruning: from scores to masks, masks that hold during training, and inference with only the kept weights."""

from shaver.pruning.automatic import DEFAULT_BUDGET, DEFAULT_NATS
from shaver.pruning.masks import Hold, Masks
from shaver.pruning.online import Online, OnlinePruner, Schedule, cubic, linear
from shaver.pruning.pruned import Pruned, PrunedLayer, prune
from shaver.pruning.ranking import Ranking
from shaver.pruning.sparse import SparseInference, SparseLayer, sparse_inference

__all__ = [
    "DEFAULT_BUDGET",
    "DEFAULT_NATS",
    "Hold",
    "Masks",
    "Online",
    "OnlinePruner",
    "Pruned",
    "PrunedLayer",
    "Ranking",
    "Schedule",
    "SparseInference",
    "SparseLayer",
    "cubic",
    "linear",
    "prune",
    "sparse_inference",
]
