"""Checks of a user's own extensions: one call per extension that says what is wrong."""

import copy
from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from shaver import criteria, curvature
from shaver.curvature.blocks import Block, Curvature, DiagonalBlock, KroneckerBlock
from shaver.curvature.rules import candidates_for
from shaver.curvature.uses import Use
from shaver.evidence import Posterior, improve
from shaver.priors import Grouping, make_prior


def check_criterion(name: str, **options: Any) -> None:
    """Check a registered pruning criterion on small networks.

    Example:
        >>> check_criterion("magnitude")

    The criterion must

    - score every prunable weight, in its shape, with floating-point numbers and without NaN;
    - return the same scores for the same seed;
    - use only what it declared in ``needs``, and work in train and eval mode and for a part of the layers;
    - leave the model unchanged: weights, buffers, gradients, modes, ``requires_grad``, hooks and the global random
      state.

    Args:
        name: The criterion's name.
        **options: Passed to the criterion.

    Raises:
        AssertionError: One of these does not hold; the message says which, and for which network.
    """
    for kind, (model, batches) in _networks().items():
        where = f"criterion {name!r} on the {kind}"
        arguments: dict[str, Any] = dict(options)
        if {"batches", "example"} & set(criteria.needs(name)):
            arguments["batches"] = batches
        if "posterior" in criteria.needs(name):
            arguments["posterior"] = Posterior(curvature.estimate(model, batches), 1.0, model)
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


def check_prior(prior: str | Grouping, model: nn.Module | None = None) -> None:
    """Check a prior, in particular a user's own grouping of weights, with diagonal and Kronecker curvature.

    Example:
        >>> def by_kernel(name, parameter):
        ...     return torch.arange(9).reshape(3, 3) if parameter.shape[-2:] == (3, 3) else name
        >>> check_prior(by_kernel)

    The grouping must not change the parameters, and must depend only on their names and shapes. Otherwise a saved
    prior would not fit the trained network. Every weight must have a positive, finite precision. Learning must raise
    the evidence at each step and keep δ within the bounds. A state dict must restore the prior.

    Args:
        prior: A prior that :func:`shaver.priors.make_prior` accepts.
        model: The network for the check. Default: two small networks.

    Raises:
        AssertionError: One of these does not hold; the message says which, and for which network.
    """
    models = {f"the {kind}": network for kind, (network, _) in _networks().items()}
    for kind, network in models.items() if model is None else [("your model", model)]:
        named = {n: p for n, p in network.named_parameters() if p.requires_grad}
        before = _footprint(network)
        numbers = make_prior(prior, named, init=2.0)
        where = f"prior {numbers.kind!r} on {kind}"
        _compare(before, _footprint(network), where)
        for name, delta in numbers.delta().items():
            wrong = delta.expand(named[name].shape).sub(2.0).abs().max() > 1e-5
            assert not wrong, f"{where}: {name!r} does not start at the initial precision."
        _check_grouping(prior, named, where)
        for structure in ("diag", "kron"):
            _check_learning(prior, named, structure, where)


def check_rule(module: nn.Module, inputs: Tensor) -> None:
    """Check a curvature rule that was added by :func:`shaver.curvature.register_rule`, on a module it is for.

    Example:
        >>> check_rule(nn.Linear(4, 3), torch.randn(5, 4))

    The rule must have a use for each trainable parameter. Its per-sample gradients and their squares must be
    autograd's, in double precision, for one output gradient and for several, and for some of the samples. It must
    leave the module as it found it.

    Args:
        module: A module of the type that the rule is for.
        inputs: What the module is called with, samples first.

    Raises:
        AssertionError: Says which of these does not hold.
    """
    candidate = next(candidates_for(module), None)
    assert candidate is not None, f"no rule is registered for {type(module).__name__}."
    where = f"rule {candidate.label!r} for {type(module).__name__}"
    module, x = copy.deepcopy(module).double(), inputs.double() if inputs.is_floating_point() else inputs
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    named = {n: p for n, p in module.named_parameters(recurse=False) if p.requires_grad}
    with torch.enable_grad():
        outputs = module(x)
    for columns in (1, 3):
        grads = torch.randn(columns, *outputs.shape, generator=generator, dtype=torch.float64)
        before = _footprint(module)
        uses = candidate.rule(module, x, grads)
        _compare(before, _footprint(module), where)
        for name, parameter in named.items():
            assert name in uses, f"{where}: no use for the parameter {name!r}; it has {sorted(uses)}."
            rows = [
                torch.autograd.grad((outputs[n] * grads[k, n]).sum(), parameter, retain_graph=True)[0]
                for k in range(columns)
                for n in range(len(x))
            ]
            expected = torch.stack(rows).reshape(columns, len(x), *parameter.shape)
            _check_use(uses[name], expected, f"{where}: {name!r} with {columns} output gradients")


def _check_use(use: Use, expected: Tensor, where: str) -> None:
    scale = float(expected.abs().max()) + 1e-12
    for start, stop in ((0, expected.shape[1]), (1, 2)):
        found, rows = use.per_sample(start, stop), expected[:, start:stop]
        assert found.shape == rows.shape, f"{where}: gradients of shape {tuple(found.shape)}, not {tuple(rows.shape)}."
        error = float((found - rows).abs().max()) if rows.numel() else 0.0
        assert error <= 1e-8 * scale, f"{where}: the gradients of samples {start} to {stop} differ from autograd's."
    squares, total = use.square_sum(), expected.square().sum((0, 1))
    assert squares.shape == total.shape, f"{where}: square_sum has shape {tuple(squares.shape)}."
    assert float((squares - total).abs().max()) <= 1e-8 * scale**2 * expected.shape[1], f"{where}: square_sum is wrong."


def _check_grouping(prior: str | Grouping, named: Mapping[str, Tensor], where: str) -> None:
    generator = torch.Generator().manual_seed(2)
    other = {n: torch.randn(p.shape, generator=generator).to(p) for n, p in named.items()}
    here, there = make_prior(prior, named), make_prior(prior, other)
    for factor in here.factors:  # all values differ, so that a different grouping gives a different precision
        factor.values = torch.arange(1.0, factor.values.numel() + 1).to(factor.values).reshape(factor.values.shape)
    try:
        there.load_state_dict(here.state_dict())
        same = all(torch.equal(there.delta_of(name), delta) for name, delta in here.delta().items())
    except ValueError:
        same = False
    assert same, f"{where}: its groups depend on the weights' values; names and shapes must decide."


def _check_learning(prior: str | Grouping, named: Mapping[str, Tensor], structure: str, where: str) -> None:
    theta = {name: parameter.detach() for name, parameter in named.items()}
    known, bounds = _curvature(theta, structure), (-7.0, 7.0)
    learned = make_prior(prior, theta, bounds=bounds)
    value = Posterior(known, learned, theta).log_evidence
    for step in range(5):
        raised = improve(learned, known, theta, steps=1).log_evidence
        slack = 1e-5 * abs(value) + 1e-3
        assert raised >= value - slack, f"{where}: step {step} with {structure} curvature lowers the evidence."
        value = raised
    for name, delta in learned.delta().items():
        logs = delta.log()
        inside = bool(((logs >= bounds[0] - 1e-3) & (logs <= bounds[1] + 1e-3)).all())  # NaN is not inside
        assert inside, f"{where}: the precision of {name!r} leaves its bounds."
    again = make_prior(prior, theta, bounds=bounds)
    again.load_state_dict(learned.state_dict())
    for name, delta in learned.delta().items():
        assert torch.equal(again.delta_of(name), delta), f"{where}: a state dict does not restore {name!r}."


def _curvature(theta: Mapping[str, Tensor], structure: str) -> Curvature:
    """Random curvature for these weights, without data."""
    generator = torch.Generator().manual_seed(1)

    def covariance(size: int) -> Tensor:
        root = torch.randn(1, size, size, generator=generator)
        return root @ root.mT

    blocks: dict[str, Block] = {}
    for name, weights in theta.items():
        if structure == "kron" and weights.ndim > 1:
            inputs = covariance(weights[0].numel())
            blocks[name] = KroneckerBlock(inputs.to(weights), covariance(len(weights)).to(weights), weights.shape)
        else:
            blocks[name] = DiagonalBlock((torch.rand(weights.shape, generator=generator) * 10).to(weights))
    return Curvature(blocks, log_likelihood=-1.0, data_size=8, structure=structure, source="ggn")


def _check_scores(model: nn.Module, scores: Mapping[str, Tensor], where: str) -> None:
    for name, weight in criteria.prunable(model).items():
        assert name in scores, f"{where}: no score for {name!r}."
        values = scores[name]
        assert values.shape == weight.shape, f"{where}: {name!r} has scores of shape {tuple(values.shape)}."
        assert values.is_floating_point(), f"{where}: the scores of {name!r} are {values.dtype}, not floating point."
        assert not values.isnan().any(), f"{where}: NaN among the scores of {name!r}."
        assert values.data_ptr() != weight.data_ptr(), f"{where}: the scores of {name!r} are the weight itself."


def _networks() -> dict[str, tuple[nn.Module, list[tuple[Tensor, Tensor]]]]:
    """A perceptron with a dead unit and an existing gradient, and a convolution with BatchNorm."""
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


def _footprint(model: nn.Module) -> dict[str, Any]:
    """Everything that an extension must leave unchanged."""
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
