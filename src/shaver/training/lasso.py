"""L1 training: the penalty as a proximal step, and a small search for its coefficient."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from shaver.shards import local
from shaver.stepping import effective_step
from shaver.training.history import History


@torch.no_grad()
def soft_threshold(optimizer: Optimizer, coefficient: float) -> None:
    """The proximal step of λ‖θ‖₁ after an optimizer's step: θ ← sign(θ) · max(|θ| − ηλ, 0).

    η is the optimizer's effective step, so at a fixed point the gradient of the mean loss balances λ, with momentum and
    with Adam. Unlike a subgradient step, it makes weights exactly zero and never oscillates around zero. Only weights
    with two or more dimensions are penalised: biases and norm parameters are not pruned.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.ndim >= 2 and parameter.grad is not None:
                amount, own = effective_step(optimizer, group, parameter) * coefficient, local(parameter)
                own.copy_(torch.copysign((own.abs() - amount).clamp_min(0), own))


def l1_norm(model: nn.Module) -> Tensor:
    """‖θ‖₁ over the penalised weights."""
    return torch.stack([p.detach().abs().sum() for p in model.parameters() if p.requires_grad and p.ndim >= 2]).sum()


@dataclass(frozen=True)
class L1Search:
    """The result of :func:`search_l1`.

    Attributes:
        coefficient: The chosen λ.
        model: The network trained with it.
        history: The history of that training.
        rows: One dict per λ: ``l1``, ``valid_loss``, ``valid_accuracy`` (classification), and ``zeros``, the share of
            weights that are exactly zero.
    """

    coefficient: float
    model: nn.Module
    history: History
    rows: list[dict[str, float]]


def search_l1(
    factory: Callable[[], nn.Module],
    train: Any,
    valid: Any,
    *,
    coefficients: Sequence[float] = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3),
    tolerance: float = 0.005,
    **fit_options: Any,
) -> L1Search:
    """Train once per coefficient and choose the *largest* that costs at most ``tolerance`` on ``valid``.

    The best validation score would nearly always choose the weakest penalty. The purpose of L1 is sparsity, so the
    strongest penalty whose accuracy is within ``tolerance`` of the best is chosen (for regression: whose validation
    loss is within ``tolerance`` nats).

    Example:
        >>> found = search_l1(lambda: LeNet(), train, valid, epochs=10)
        >>> found.coefficient, found.model

    Args:
        factory: Builds a new network; called once per coefficient, each time with the same seed.
        train: Training data, as for :func:`shaver.fit`.
        valid: Validation data; never the test set.
        coefficients: The values of λ to try.
        tolerance: Acceptable loss of validation accuracy (or nats).
        **fit_options: Passed to :func:`shaver.fit`; ``folder`` gets one subfolder per λ.
    """
    from shaver.training.fitting import fit  # the loop applies soft_threshold, so it imports this module

    if valid is None or not coefficients:
        raise ValueError("search_l1 needs validation data and at least one coefficient.")
    if clash := {"method", "l1"} & fit_options.keys():
        raise ValueError(f"search_l1 sets {', '.join(sorted(clash))} itself; leave it out.")
    folder = fit_options.pop("folder", None)
    tried: list[tuple[float, nn.Module, History, dict[str, float]]] = []
    for coefficient in sorted(coefficients):
        with torch.random.fork_rng():
            torch.manual_seed(fit_options.get("seed", 0))
            model = factory()
        place = None if folder is None else f"{folder}/l1_{coefficient:g}"
        history = fit(model, train, valid, method="l1", l1=coefficient, folder=place, **fit_options)
        weights = [p.detach() for p in model.parameters() if p.requires_grad and p.ndim >= 2]
        zeros = sum(int((w == 0).sum()) for w in weights) / sum(w.numel() for w in weights)
        row: dict[str, float] = {
            key: history[-1][key] for key in ("valid_loss", "valid_accuracy") if key in history[-1]
        }
        tried.append((coefficient, model, history, {"l1": coefficient, **row, "zeros": zeros}))
    costs = [1 - row["valid_accuracy"] if "valid_accuracy" in row else row["valid_loss"] for *_, row in tried]
    chosen = max(i for i, cost in enumerate(costs) if cost <= min(costs) + tolerance)
    coefficient, model, history, _ = tried[chosen]
    return L1Search(coefficient, model, history, [row for *_, row in tried])
