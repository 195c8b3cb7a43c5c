"""torch-pruning used directly, with its own importances, down to a share of the FLOPs: the rival of structured.py."""

import copy
import math
from collections.abc import Iterator, Sequence
from typing import Any

IMPORTANCES = ("L2", "Taylor", "Hessian")
#: Samples for the importances that need gradients.
SAMPLES = 512
#: Steps from the whole network to none, as in torch-pruning's own experiments, and how often gradients are taken anew.
STEPS, FRESH = 400, 20


def pruned(
    model: Any, importance: str, ratios: Sequence[float], batch: tuple[Any, Any], *, everywhere: bool
) -> Iterator[tuple[float, Any]]:
    """Copies with so many times fewer FLOPs, each ratio with the network whose FLOPs are nearest to it.

    torch-pruning leaves a layer whole when it is asked for all of its channels at once: at a ratio of 0.85, six
    channels stay six, and FLOPs do not fall with the ratio. Its own experiments therefore prune in 400 small steps
    until the FLOPs are few enough; so does this. Gradients are taken anew every 20 steps and pruned with the weights in
    between.

    Args:
        model: A trained network of the zoo whose last linear layer is its output.
        importance: One of IMPORTANCES.
        ratios: How many times fewer FLOPs.
        batch: Inputs and labels, for gradients.
        everywhere: Rank the channels of all layers together instead of taking the same share of each.
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
    """The mean gradient of the loss into ``.grad``, or the mean of the samples' squared ones.

    GroupHessianImportance takes squared gradients from there; its own ``accumulate_grad`` keeps the last sample alone
    (version 1.6.0), so that it is not used.
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
