"""The highest sparsity within a tolerated loss of quality, by bisection on validation data."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from shaver.batches import Forward, Targets, check_batches, forward_of, targets_of
from shaver.measure.evaluating import evaluating, restored
from shaver.naming import check_number
from shaver.pruning.masks import Masks
from shaver.pruning.ranking import Ranking

#: The share of weights at which the bisection ends.
TOLERANCE = 0.001
#: Quality of a model, higher is better.
Quality = Callable[[nn.Module], float]


def quality_on(valid: Iterable[Any] | Quality, forward: Forward | None, targets: Targets | None) -> Quality:
    """The user's quality function, whose values are checked; or the accuracy on batches, as such a function.

    Accuracy is the share of samples (or tokens) whose highest output is the target; targets below zero do not count.
    """
    if callable(valid):
        return lambda model: check_number("the quality that valid measures", valid(model))
    outputs_of, labels_of = forward or forward_of, targets or targets_of
    check_batches(valid, "valid")
    data = list(valid) if isinstance(valid, Iterator) else valid  # a generator can be read only once

    def accuracy(model: nn.Module) -> float:
        right = counted = 0
        with evaluating(model), torch.random.fork_rng(devices=[]):
            for batch in data:
                predicted, labels = outputs_of(model, batch).argmax(-1), labels_of(batch)
                if predicted.shape != labels.shape:
                    raise ValueError(
                        f"predictions of shape {tuple(predicted.shape)} do not fit targets of shape "
                        f"{tuple(labels.shape)}; valid=lambda model: … measures another quality."
                    )
                known = labels >= 0
                right += int((predicted == labels)[known].sum())
                counted += int(known.sum())
        if not counted:
            raise ValueError("the validation data are empty.")
        return right / counted

    return accuracy


def highest_sparsity(
    model: nn.Module, ranking: Ranking, quality: Quality, *, max_drop: float, limit: float
) -> tuple[Masks, float, float]:
    """Bisect for the highest sparsity up to ``limit`` whose quality is at most ``max_drop`` below the dense network's.

    The upper end is tried first. The result is always measured to be within the tolerance, and the next higher sparsity
    that was tried is not, even if quality does not fall evenly. The weights are restored after each trial, also after
    an error. Returns the masks, the quality before and the quality with them.
    """
    total = ranking.total
    before = quality(model)
    best, best_quality = ranking.removing(0), before

    def within(count: int) -> bool:
        nonlocal best, best_quality
        masks = ranking.removing(count)
        with restored(masks.parameters(model).values(), always=True):
            masks.apply_(model)
            reached = quality(model)
        if reached < before - max_drop:
            return False
        best, best_quality = masks, reached
        return True

    low, high = 0, min(total - 1, round(min(limit, ranking.limit) * total))
    if within(high):
        return best, before, best_quality
    while high - low > max(1, round(TOLERANCE * total)):
        middle = (low + high) // 2
        low, high = (middle, high) if within(middle) else (low, middle)
    return best, before, best_quality
