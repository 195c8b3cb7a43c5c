"""Pruning: from scores to masks, and masks in force."""

from shaver.pruning.automatic import DEFAULT_NATS, evidence_gain
from shaver.pruning.hold import Hold
from shaver.pruning.masks import Masks
from shaver.pruning.pruned import Pruned, PrunedLayer, prune
from shaver.pruning.ranking import Ranking, masks_at

__all__ = ["DEFAULT_NATS", "Hold", "Masks", "Pruned", "PrunedLayer", "Ranking", "evidence_gain", "masks_at", "prune"]
