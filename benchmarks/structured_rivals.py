"""torch-pruning used directly, with its own importances, down to a share of the FLOPs: the rival of structured.py."""

import copy
from typing import Any

IMPORTANCES = ("L2", "Taylor", "Hessian")
#: Samples for the importances that need gradients.
SAMPLES = 512


def pruned(model: Any, importance: str, flop_share: float, batch: tuple[Any, Any], *, everywhere: bool) -> Any:
    """A copy with at most this share of the FLOPs, by bisection of torch-pruning's ``pruning_ratio``.

    Args:
        model: A trained network of the zoo whose last linear layer is its output.
        importance: One of IMPORTANCES.
        flop_share: What may be left.
        batch: Inputs and labels, for gradients.
        everywhere: Rank the channels of all layers together instead of taking the same share of each.
    """
    from shaver.measure import flops

    example = batch[0][:1]
    goal = flop_share * flops(model, example).dense
    low, high, best = 0.0, 0.99, None
    for _ in range(12):
        ratio = (low + high) / 2
        small = _at_ratio(model, importance, ratio, batch, everywhere)
        if flops(small, example).dense <= goal:
            high, best = ratio, small
        else:
            low = ratio
    return best if best is not None else _at_ratio(model, importance, 0.99, batch, everywhere)


def _at_ratio(model: Any, importance: str, ratio: float, batch: tuple[Any, Any], everywhere: bool) -> Any:
    import torch
    import torch.nn.functional as F
    import torch_pruning as tp

    small = copy.deepcopy(model)
    chosen = {
        "L2": lambda: tp.importance.GroupMagnitudeImportance(p=2),
        "Taylor": tp.importance.GroupTaylorImportance,
        "Hessian": tp.importance.GroupHessianImportance,
    }[importance]()
    inputs, labels = (part[:SAMPLES] for part in batch)
    last = [module for module in small.modules() if isinstance(module, torch.nn.Linear)][-1]
    pruner = tp.pruner.BasePruner(
        small,
        inputs[:1],
        importance=chosen,
        pruning_ratio=ratio,
        max_pruning_ratio=1.0,
        global_pruning=everywhere,
        ignored_layers=[last],
    )
    if importance == "Taylor":
        F.cross_entropy(small(inputs), labels).backward()
    elif importance == "Hessian":
        chosen.zero_grad()
        for i in range(len(inputs)):  # one sample at a time: its squared gradients are what is summed
            small.zero_grad()
            F.cross_entropy(small(inputs[i : i + 1]), labels[i : i + 1]).backward()
            chosen.accumulate_grad(small)
    pruner.step()
    small.zero_grad()
    return small
