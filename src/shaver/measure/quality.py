"""Quality of the outputs: accuracy, NLL, ECE and Brier score, or NLL and RMSE, in one pass over the batches."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from shaver.batches import Forward, Targets, check_batches, check_values, forward_of, targets_of
from shaver.likelihoods import Classification, Likelihood, Regression, get_likelihood
from shaver.measure.evaluating import evaluating
from shaver.naming import check_count, check_functions


@dataclass(frozen=True)
class Quality:
    """Quality of a network on some data. A measure that does not apply to the likelihood is None.

    Attributes:
        count: Number of items that the means are over. Classification: labels (per sample, token or pixel) without
            the ignored ones. Otherwise: samples.
        nll: Mean negative log likelihood (NLL); the outputs of a sample are summed.
        accuracy: Share of labels with the highest output; of equal outputs the first counts as highest.
        ece: Expected calibration error (ECE) Σ_b n_b/n · |accuracy_b − confidence_b| over equal-width bins of the
            highest probability. A bin includes its lower edge; the last bin also includes 1.
        brier: Mean of Σ_c (p_c − y_c)², between 0 and 2.
        rmse: Root mean squared error (RMSE) over all outputs of all samples.
    """

    count: int
    nll: float
    accuracy: float | None = None
    ece: float | None = None
    brier: float | None = None
    rmse: float | None = None

    def as_dict(self) -> dict[str, float]:
        """The measures that apply, by name."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def quality(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    likelihood: str | Likelihood = "classification",
    bins: int = 15,
    forward: Forward | None = None,
    targets: Targets | None = None,
) -> Quality:
    """Measure a network on batches, in evaluation mode and in one pass. Sums are in float64.

    Example:
        >>> quality(model, test_loader).as_dict()
        {'count': ..., 'nll': ..., 'accuracy': ..., 'ece': ..., 'brier': ...}

    Args:
        model: The network. The modes of its modules do not change.
        batches: ``(x, y)`` tuples, dicts with ``labels``, or any batches with ``forward`` and ``targets``. Batches may
            differ in size: every label has the same weight.
        likelihood: ``"classification"``, ``"regression"`` (NLL with its ``noise``), or a likelihood object. A user's
            own likelihood gives only the NLL.
        bins: Number of bins of the calibration error.
        forward: ``forward(model, batch)`` returns the outputs.
        targets: ``targets(batch)`` returns the targets.

    Raises:
        ValueError: There are no samples, a label is out of range, or outputs or targets hold NaN or infinity.
    """
    chosen = get_likelihood(likelihood)
    check_count("bins", bins)
    check_functions(forward=forward, targets=targets)
    check_values(model, "quality")
    check_batches(batches, "quality")
    sums = _Classification(chosen, bins) if isinstance(chosen, Classification) else _Samples(chosen)
    with evaluating(model):
        for index, batch in enumerate(batches):
            outputs = (forward or forward_of)(model, batch)
            labels = (targets or targets_of)(batch).to(outputs.device)
            _check_numbers(index, batch, outputs, labels)
            chosen.check(outputs, labels)
            sums.add(outputs, labels)
    if sums.count == 0:
        raise ValueError(
            "batches held nothing to measure: the loader is empty, every label is ignored, or a generator was already "
            "used up."
        )
    return sums.result()


class _Classification:
    """Running sums of the classification measures."""

    def __init__(self, likelihood: Classification, bins: int) -> None:
        self.likelihood = likelihood
        self.edges = torch.linspace(0, 1, bins + 1, dtype=torch.float64)[1:-1]
        self.count = 0
        self.nll = self.correct = self.brier = 0.0
        self.gap = torch.zeros(bins, dtype=torch.float64)  # Σ (correct − confidence) per bin

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        logits = outputs.movedim(self.likelihood.class_dim, -1).flatten(0, -2)
        labels = targets.flatten()
        counted = labels != self.likelihood.ignore_index
        logits, labels = logits[counted].to("cpu", torch.float64), labels[counted].to("cpu", torch.int64)
        if not len(labels):
            return
        logs = logits.log_softmax(-1)
        of_label = logs.gather(1, labels.unsqueeze(1)).squeeze(1)
        p = logs.exp()
        # argmax of the logits, because rounding may make probabilities equal. On the CPU it is the first of equal ones.
        guess = logits.argmax(-1)
        confidence = p.gather(1, guess.unsqueeze(1)).squeeze(1)
        correct = (guess == labels).double()
        self.count += len(labels)
        self.nll -= float(of_label.sum())
        self.correct += float(correct.sum())
        # Σ_c (p_c − y_c)² = Σ_c p_c² − 2 p_y + 1
        self.brier += float((p.square().sum(1) - 2 * of_label.exp() + 1).sum())
        self.gap.index_add_(0, torch.bucketize(confidence, self.edges, right=True), correct - confidence)

    def result(self) -> Quality:
        return Quality(
            count=self.count,
            nll=self.nll / self.count,
            accuracy=self.correct / self.count,
            ece=float(self.gap.abs().sum()) / self.count,
            brier=self.brier / self.count,
        )


class _Samples:
    """Running sums of the measures for all other likelihoods; squared errors for regression."""

    def __init__(self, likelihood: Likelihood) -> None:
        self.likelihood = likelihood
        self.count = self.numbers = 0
        self.nll = self.squares = 0.0

    def add(self, outputs: Tensor, targets: Tensor) -> None:
        outputs, targets = outputs.double(), targets.double() if targets.is_floating_point() else targets
        self.count += len(outputs)
        self.nll += float(self.likelihood.nll(outputs, targets).double().sum())
        if isinstance(self.likelihood, Regression):
            self.numbers += outputs.numel()
            self.squares += float((outputs - targets).square().sum())

    def result(self) -> Quality:
        rmse = math.sqrt(self.squares / self.numbers) if self.numbers else None
        return Quality(count=self.count, nll=self.nll / self.count, rmse=rmse)


def _check_numbers(index: int, batch: Any, outputs: Tensor, targets: Tensor) -> None:
    """Refuse NaN and +∞, and name the batch. −∞ is a legal logit for an impossible class."""
    if targets.is_floating_point() and not bool(targets.isfinite().all()):
        raise ValueError(f"the targets of batch {index} hold NaN or infinity.")
    if not bool((outputs.isnan() | outputs.isposinf()).any()):
        return
    values = batch.values() if isinstance(batch, Mapping) else batch if isinstance(batch, tuple | list) else [batch]
    inputs = [value for value in values if isinstance(value, Tensor) and value.is_floating_point()]
    if any(not bool(value.isfinite().all()) for value in inputs):
        raise ValueError(f"the inputs of batch {index} hold NaN or infinity, and so do the network's outputs.")
    raise ValueError(
        f"the network's outputs for batch {index} hold NaN or infinity although its inputs do not: the weights have "
        "diverged or hold NaN."
    )
