"""torch-pruning with its own importances, down to a target in FLOPs, for the part rivals of structured.py."""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

IMPORTANCES = ("L2", "Taylor", "Hessian")
#: Samples for importances that need gradients.
SAMPLES = 512
#: Pruning steps from the whole network to nothing, as in torch-pruning's own experiments, and steps per new gradient.
STEPS, FRESH = 400, 20


def pruned(
    model: Any, importance: str, ratios: Sequence[float], batch: tuple[Any, Any], *, everywhere: bool
) -> Iterator[tuple[float, Any]]:
    """Yield each ratio with the pruned copy whose FLOPs are nearest to it.

    In a single step torch-pruning leaves a layer whole when it is asked for all of its channels: at a ratio of 0.85,
    six channels stay six, and FLOPs do not fall with the ratio. Its own experiments therefore prune in 400 small steps
    until the FLOPs are low enough, and so does this function. Gradients are computed again every 20 steps and pruned
    with the weights in between.

    Args:
        model: A trained network of the zoo whose last linear layer is its output.
        importance: One of IMPORTANCES.
        ratios: How many times fewer FLOPs.
        batch: Inputs and labels, for gradients.
        everywhere: Rank the channels of all layers together instead of pruning the same share of each layer.
    """
    import torch
    import torch_pruning as tp

    from shaver.measure import flops

    example = batch[0][:1]
    dense = flops(model, example).dense
    small = copy.deepcopy(model).eval()
    last = [module for module in small.modules() if isinstance(module, torch.nn.Linear)][-1]
    chosen = {
        "L2": lambda: tp.importance.GroupMagnitudeImportance(p=2),
        "Taylor": tp.importance.GroupTaylorImportance,
        "Hessian": tp.importance.GroupHessianImportance,
    }[importance]()
    pruner = tp.pruner.BasePruner(
        small,
        example,
        importance=chosen,
        pruning_ratio=1.0,
        iterative_steps=STEPS,
        global_pruning=everywhere,
        ignored_layers=[last],
    )
    found = {1.0: copy.deepcopy(small)}
    for step in range(STEPS):
        if max(found) >= max(ratios):
            break
        if importance != "L2" and step % FRESH == 0:
            fill_gradients(small, batch, squared=importance == "Hessian")
        pruner.step()
        found.setdefault(dense / flops(small, example).dense, copy.deepcopy(small))
    for ratio in ratios:
        nearest = found[min(found, key=lambda reached: abs(math.log(reached / ratio)))]
        nearest.zero_grad()
        yield ratio, nearest


def fill_gradients(model: Any, batch: tuple[Any, Any], *, squared: bool) -> None:
    """Write the mean gradient into ``.grad``, or the mean of the squared per-sample gradients.

    GroupHessianImportance reads squared gradients from there. Its own ``accumulate_grad`` keeps only the last sample
    (version 1.6.0), so it is not used.
    """
    import torch
    import torch.nn.functional as F
    from torch.func import functional_call, grad, vmap

    inputs, labels = (part[:SAMPLES] for part in batch)
    if not squared:
        model.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        return

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(functional_call(model, weights, (x[None],)), y[None])

    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    each = vmap(grad(loss), in_dims=(None, 0, 0))(weights, inputs, labels)
    for name, parameter in model.named_parameters():
        parameter.grad = each[name].square().mean(0)
