"""Checks for a user's own extensions: one call that says what is wrong, in the manner of a conformance suite."""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shaver import criteria, curvature
from shaver.evidence import Posterior


def check_criterion(name: str, **options: Any) -> None:
    """Check a registered pruning criterion on small networks.

    Example:
        >>> check_criterion("magnitude")

    It must score every prunable weight and nothing else's shape, with numbers and without NaN; give the same scores
    for the same seed; work from what it declared in ``needs`` alone, in train and in eval mode and for a part of the
    layers; and leave the model as it found it: weights, buffers, gradients, modes, ``requires_grad``, hooks and the
    global random state.

    Args:
        name: The criterion's name.
        **options: Passed to it.

    Raises:
        AssertionError: Says which of these does not hold, and for which network.
    """
    for kind, (model, batches) in _networks().items():
        where = f"criterion {name!r} on the {kind}"
        arguments: dict[str, Any] = dict(options)
        if "batches" in criteria.needs(name):
            arguments["batches"] = batches
        if "posterior" in criteria.needs(name):
            arguments["posterior"] = _posterior(model, batches)
        run = partial(criteria.score, model, name, **arguments)
        for mode in (True, False):
            model.train(mode)
            before = _footprint(model)
            scores = run()
            _compare(before, _footprint(model), where)
        _check_scores(model, scores, where)
        again = run()
        assert all(torch.equal(scores[n], again[n]) for n in scores), f"{where}: two calls with one seed differ."
        part = run(exclude_last=True)
        assert set(part) == set(list(scores)[:-1]), f"{where}: without the last layer it scored {sorted(part)}."


def _check_scores(model: nn.Module, scores: Mapping[str, Tensor], where: str) -> None:
    for name, weight in criteria.prunable(model).items():
        assert name in scores, f"{where}: no score for {name!r}."
        values = scores[name]
        assert values.shape == weight.shape, f"{where}: {name!r} has scores of shape {tuple(values.shape)}."
        assert values.is_floating_point(), f"{where}: the scores of {name!r} are {values.dtype}, not numbers to rank."
        assert not values.isnan().any(), f"{where}: NaN among the scores of {name!r}."
        assert values.data_ptr() != weight.data_ptr(), f"{where}: the scores of {name!r} are the weight itself."


def _networks() -> dict[str, tuple[nn.Module, list[tuple[Tensor, Tensor]]]]:
    """A multilayer perceptron with a dead unit, and a convolution with BatchNorm; both with gradients of their own."""
    generator = torch.Generator().manual_seed(0)

    def data(*shape: int) -> list[tuple[Tensor, Tensor]]:
        sizes = (5, 3)  # unequal batches: a mean over samples is not a mean over batches
        return [
            (torch.randn(n, *shape, generator=generator), torch.randint(0, 3, (n,), generator=generator)) for n in sizes
        ]

    perceptron = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Dropout(0.5), nn.Linear(6, 3))
    convolution = nn.Sequential(
        *(nn.Conv2d(2, 4, 3, bias=False), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(16, 3))
    )
    for network in (perceptron, convolution):
        with torch.no_grad():
            for parameter in network.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.5)
    with torch.no_grad():
        perceptron.get_submodule("0").get_parameter("weight")[0] = 0
        perceptron.get_submodule("0").get_parameter("bias")[0] = -1
    perceptron.get_submodule("0").get_parameter("weight").grad = torch.ones(6, 4)
    return {"perceptron": (perceptron, data(4)), "convolution": (convolution, data(2, 4, 4))}


def _posterior(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> Posterior:
    estimated = curvature.estimate(model, batches)
    return Posterior(estimated, 1.0, dict(model.named_parameters()))


def _footprint(model: nn.Module) -> dict[str, Any]:
    """Everything a visitor must leave as it was."""
    return {
        "weights and buffers": {name: tensor.detach().clone() for name, tensor in model.state_dict().items()},
        "gradients": {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()},
        "requires_grad": [parameter.requires_grad for parameter in model.parameters()],
        "train or eval mode": [module.training for module in model.modules()],
        "hooks": [len(module._forward_hooks) + len(module._forward_pre_hooks) for module in model.modules()],
        "the global random state": torch.get_rng_state(),
    }


def _compare(before: Mapping[str, Any], after: Mapping[str, Any], where: str) -> None:
    def same(a: Any, b: Any) -> bool:
        if isinstance(a, Tensor) and isinstance(b, Tensor):
            return torch.equal(a, b)
        if isinstance(a, dict) and isinstance(b, dict):
            return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
        return bool(a == b)

    for what, value in before.items():
        assert same(value, after[what]), f"{where}: it changed the model's {what.removeprefix('the ')}."
