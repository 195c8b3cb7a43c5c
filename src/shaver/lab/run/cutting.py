"""What is cut off a trained network: single weights, whose places stay, or whole units, which make it smaller."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from shaver.criteria import score
from shaver.data import Splits
from shaver.lab.run.store import Trained
from shaver.pruning import Masks, prune
from shaver.structure import ChoiceOptions, Chooser, find_groups, remove_units, score_units

Scores = Mapping[str, Tensor]


@dataclass(frozen=True)
class Cut:
    """A network of which something was cut off.

    Attributes:
        network: A copy; the trained network is as it was.
        achieved: The share that went.
        masks: What has to stay zero when it is trained on, if anything.
        evidence_change: What it did to the log evidence, where that is known.
    """

    network: nn.Module
    achieved: float
    masks: Masks | None = None
    evidence_change: float | None = None


class Weights:
    """Single weights become zero."""

    verb, faster = "pruning", False

    def __init__(self, trained: Trained) -> None:
        self.trained = trained

    def score(self, criterion: str, **given: Any) -> Scores:
        """A score for each weight."""
        return score(self.trained.model, criterion, posterior=self.trained.posterior, **given)

    def cut(self, scores: Scores, sparsity: float) -> Cut:
        """The network without this share of its weights."""
        network = copy.deepcopy(self.trained.model)
        pruned = prune(network, scores, sparsity, posterior=self.trained.posterior)
        return Cut(network, pruned.achieved, pruned.masks, pruned.evidence_change)


class Units:
    """The same share of units goes from each layer, and the network is compacted."""

    verb, faster = "compacting", True

    def __init__(self, trained: Trained, data: Splits) -> None:
        self.trained, self.example = trained, data.test[:2][0]
        self.groups = find_groups(trained.model, self.example)
        self.chooser = Chooser(trained.model, self.groups, ChoiceOptions(), self.example)

    def score(self, criterion: str, **given: Any) -> Scores:
        """A score for each unit."""
        return score_units(self.trained.model, self.groups, criterion, posterior=self.trained.posterior, **given)

    def cut(self, scores: Scores, sparsity: float) -> Cut:
        """The network without this share of its units."""
        chosen = self.chooser.choose(scores, sparsity)
        done = remove_units(self.trained.model, self.groups, chosen.kept, self.example)
        return Cut(done.model, chosen.achieved)
