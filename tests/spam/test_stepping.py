"""The prior in an optimizer's step: η is the step the optimizer really makes, and no δ is too large."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import Optimizer

import shaver
from shaver.curvature import blocks
from shaver.stepping import Factors, add_prior_gradient, apply_prior, effective_step, take_step, unscale

Make = Callable[[list[Tensor]], Optimizer]


def weight(*values: float, dtype: torch.dtype = torch.float64) -> nn.Parameter:
    return nn.Parameter(torch.tensor(values, dtype=dtype))


def gradients(steps: int = 7) -> Tensor:
    return torch.randn(steps, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def run(make: Make, grads: Tensor) -> tuple[nn.Parameter, Optimizer]:
    p = weight(1.0, -2.0, 3.0)
    optimizer = make([p])
    for g in grads:
        p.grad = g.clone()
        optimizer.step()
    return p, optimizer


def decayed(squares: Tensor, beta: float) -> list[Tensor]:
    """v_t = β v_{t−1} + (1 − β) g_t² for every t."""
    v, found = torch.zeros_like(squares[0]), []
    for g in squares:
        v = beta * v + (1 - beta) * g
        found.append(v)
    return found


def adam(g: Tensor, lr: float, beta: float, eps: float, amsgrad: bool = False) -> Tensor:
    history = torch.stack(decayed(g.square(), beta))
    v = history.amax(0) if amsgrad else history[-1]
    return lr / ((v / (1 - beta ** len(g))).sqrt() + eps)


def rms(g: Tensor, lr: float, alpha: float, eps: float, centered: bool = False) -> Tensor:
    v = decayed(g.square(), alpha)[-1]
    return lr / ((v - decayed(g, alpha)[-1].square() if centered else v).sqrt() + eps)


T = torch.optim
BY_HAND: dict[str, tuple[Make, Callable[[Tensor], Tensor | float]]] = {
    "sgd": (lambda p: T.SGD(p, lr=0.3), lambda g: 0.3),
    "sgd momentum": (lambda p: T.SGD(p, lr=0.3, momentum=0.9), lambda g: 3.0),
    "sgd dampening": (lambda p: T.SGD(p, lr=0.3, momentum=0.9, dampening=0.5), lambda g: 1.5),
    "sgd nesterov": (lambda p: T.SGD(p, lr=0.3, momentum=0.9, nesterov=True), lambda g: 3.0),
    "sgd dampening only": (lambda p: T.SGD(p, lr=0.3, dampening=0.5), lambda g: 0.3),
    "adam": (lambda p: T.Adam(p, lr=0.01, betas=(0.8, 0.95), eps=1e-3), lambda g: adam(g, 0.01, 0.95, 1e-3)),
    "adam amsgrad": (
        lambda p: T.Adam(p, lr=0.01, betas=(0.8, 0.7), eps=1e-3, amsgrad=True),
        lambda g: adam(g, 0.01, 0.7, 1e-3, amsgrad=True),
    ),
    "adam first step": (lambda p: T.Adam(p, lr=0.01), lambda g: adam(g, 0.01, 0.999, 1e-8)),
    "adamw": (
        lambda p: T.AdamW(p, lr=0.01, betas=(0.9, 0.95), weight_decay=0.1),
        lambda g: adam(g, 0.01, 0.95, 1e-8),
    ),
    "nadam": (lambda p: T.NAdam(p, lr=0.01), lambda g: adam(g, 0.01, 0.999, 1e-8)),
    "rmsprop": (lambda p: T.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-3), lambda g: rms(g, 0.01, 0.9, 1e-3)),
    "rmsprop momentum": (
        lambda p: T.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-3, momentum=0.75),
        lambda g: 4 * rms(g, 0.01, 0.9, 1e-3),
    ),
    "rmsprop centered": (
        lambda p: T.RMSprop(p, lr=0.01, alpha=0.9, eps=1e-3, centered=True),
        lambda g: rms(g, 0.01, 0.9, 1e-3, centered=True),
    ),
    "adagrad": (
        lambda p: T.Adagrad(p, lr=0.1, lr_decay=0.5, initial_accumulator_value=0.2, eps=1e-3),
        lambda g: 0.1 / (1 + 0.5 * (len(g) - 1)) / ((0.2 + g.square().sum(0)).sqrt() + 1e-3),
    ),
    "another kind": (lambda p: T.Adamax(p, lr=0.02), lambda g: 0.02),
}


@pytest.mark.parametrize("name", BY_HAND)
def test_the_effective_step_by_hand(name: str):
    make, by_hand = BY_HAND[name]
    grads = gradients(1 if name == "adam first step" else 7)
    p, optimizer = run(make, grads)
    found = effective_step(optimizer, optimizer.param_groups[0], p)
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float64), torch.as_tensor(by_hand(grads)).double())


STEADY: dict[str, Make] = {
    "sgd": lambda p: T.SGD(p, lr=0.3),
    "sgd momentum": lambda p: T.SGD(p, lr=0.3, momentum=0.9),
    "sgd dampening": lambda p: T.SGD(p, lr=0.3, momentum=0.9, dampening=0.5),
    "sgd nesterov": lambda p: T.SGD(p, lr=0.3, momentum=0.9, nesterov=True),
    "adam": lambda p: T.Adam(p, lr=0.01),
    "amsgrad": lambda p: T.Adam(p, lr=0.01, amsgrad=True),
    "adamw": lambda p: T.AdamW(p, lr=0.01, weight_decay=0.0),
    "nadam": lambda p: T.NAdam(p, lr=0.01),
    "radam": lambda p: T.RAdam(p, lr=0.01, betas=(0.9, 0.98)),
    "rmsprop": lambda p: T.RMSprop(p, lr=0.01, momentum=0.5),
    "adagrad": lambda p: T.Adagrad(p, lr=0.1, lr_decay=0.1),
    "adadelta": lambda p: T.Adadelta(p, lr=0.7),
}


@pytest.mark.parametrize("name", STEADY)
def test_it_is_how_far_a_constant_gradient_moves_a_weight(name: str):
    """No formula: the optimizer's own step, once its averages have settled, divided by the gradient."""
    gradient = torch.tensor([0.5, -2.0, 0.01], dtype=torch.float64)
    p, optimizer = run(STEADY[name], gradient.expand(3000, 3))
    before = p.detach().clone()
    eta = effective_step(optimizer, optimizer.param_groups[0], p)
    p.grad = gradient.clone()
    optimizer.step()
    torch.testing.assert_close((before - p.detach()) / gradient, eta + torch.zeros(3).double(), rtol=0.01, atol=0.0)


def test_learning_the_state_changes_none_of_it():
    for make in STEADY.values():
        p, optimizer = run(make, gradients())
        before = {k: v.clone() for k, v in optimizer.state[p].items() if isinstance(v, Tensor)}
        apply_prior(optimizer, {p: torch.ones(3).double()}, 0.1)
        assert all(torch.equal(v, optimizer.state[p][k]) for k, v in before.items())


# The proximal step -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", STEADY)
def test_the_proximal_step_divides_by_one_plus_eta_delta(name: str):
    p, optimizer = run(STEADY[name], gradients())
    before, delta = p.detach().clone(), torch.tensor([0.5, 20.0, 3e3], dtype=torch.float64)
    eta = effective_step(optimizer, optimizer.param_groups[0], p)
    kept = delta.clone()
    apply_prior(optimizer, {p: delta}, 0.01)
    torch.testing.assert_close(p.detach(), before / (1 + eta * 0.01 * delta))
    assert torch.equal(delta, kept), "δ is the prior's own tensor"


@pytest.mark.parametrize("delta", [3.0, 30.0, 3e6])
def test_repeated_it_finds_the_penalised_optimum(delta: float):
    """θ → −g/(sδ), the minimum of gθ + ½ s δ θ², also where an explicit step (η s δ > 2) would diverge."""
    p, strength, gradient = weight(1.0, -3.0), 0.1, torch.tensor([0.7, -0.2], dtype=torch.float64)
    optimizer = torch.optim.SGD([p], lr=0.5)
    for _ in range(2000):
        p.grad = gradient.clone()
        optimizer.step()
        apply_prior(optimizer, {p: torch.full((2,), delta).double()}, strength)
        if delta > 1e5:  # smaller than a ten-thousandth of its last value: zero, see below
            assert not p.detach().any()
    if delta < 1e5:
        torch.testing.assert_close(p.detach(), -gradient / (strength * delta), rtol=1e-9, atol=0.0)


def test_factors_of_earlier_steps_are_used_only_while_delta_and_the_learning_rate_stay():
    p, delta, factors = weight(1.0, -2.0), torch.tensor([3.0, 50.0], dtype=torch.float64), Factors()
    optimizer = torch.optim.SGD([p], lr=0.5)
    p.grad = torch.zeros_like(p)

    def factor_after(lr: float, precision: Tensor) -> Tensor:
        before = p.detach().clone()
        optimizer.param_groups[0]["lr"] = lr
        apply_prior(optimizer, {p: precision}, 0.1, factors=factors)
        return p.detach() / before

    def exact(lr: float, precision: Tensor) -> Tensor:
        return 1 / (1 + lr * 0.1 * precision)

    torch.testing.assert_close(factor_after(0.5, delta), exact(0.5, delta))
    torch.testing.assert_close(factor_after(0.501, delta), exact(0.5, delta))  # nearly the same: not computed again
    torch.testing.assert_close(factor_after(0.51, delta), exact(0.51, delta))
    torch.testing.assert_close(factor_after(0.0, delta), torch.ones_like(delta))
    other = delta.clone()
    torch.testing.assert_close(factor_after(0.5, other.mul_(2)), exact(0.5, 2 * delta))
    torch.testing.assert_close(factor_after(0.5, other.mul_(2)), exact(0.5, 4 * delta))  # changed in place


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_huge_precision_gives_exactly_zero(dtype: torch.dtype):
    p = weight(1.0, -1e-20, 3.0, dtype=dtype)
    optimizer = torch.optim.SGD([p], lr=0.1)
    p.grad = torch.zeros_like(p)
    apply_prior(optimizer, {p: torch.tensor([1e12, math.inf, 1e38])}, 1.0)
    assert torch.equal(p.detach(), torch.zeros(3, dtype=dtype))


def test_one_number_for_a_whole_tensor_broadcasts():
    p = weight(1.0, -2.0, 3.0)
    optimizer = torch.optim.SGD([p], lr=0.5)
    p.grad = torch.zeros_like(p)
    apply_prior(optimizer, {p: torch.tensor(2.0, dtype=torch.float64)}, 1.0)
    torch.testing.assert_close(p.detach(), torch.tensor([0.5, -1.0, 1.5], dtype=torch.float64))


@pytest.mark.parametrize("name", ["sgd momentum", "adam", "amsgrad", "rmsprop", "adagrad", "adadelta"])
@pytest.mark.parametrize("shape", [(7, 4), (7, 1), (4,), ()])
def test_a_large_tensor_is_treated_a_few_rows_at_a_time(name: str, shape: tuple[int, ...], monkeypatch):
    monkeypatch.setattr(blocks, "PIECE", 9)
    p = nn.Parameter(torch.randn(7, 4, dtype=torch.float64))
    optimizer = STEADY[name]([p])
    for _ in range(3):
        p.grad = torch.randn(7, 4, dtype=torch.float64)
        optimizer.step()
    delta = 50 * torch.rand(shape, dtype=torch.float64)
    eta, before = effective_step(optimizer, optimizer.param_groups[0], p), p.detach().clone()
    assert len(list(blocks.row_pieces(p))) == 4
    apply_prior(optimizer, {p: delta}, 0.01)
    wanted = before / (1 + eta * 0.01 * delta)
    if isinstance(eta, Tensor):
        wanted = limited(before, wanted)
    torch.testing.assert_close(p.detach(), wanted)


def limited(before: Tensor, wanted: Tensor) -> Tensor:
    """Each row moves by at most a hundredth of its length, row by row."""
    rows = []
    for old, new in zip(before, wanted, strict=True):
        far, most = float((new - old).norm()), 0.01 * float(old.norm())
        rows.append(new if far <= most else old + (new - old) * most / far)
    return torch.stack(rows)


@pytest.mark.parametrize("name", ["adam", "rmsprop"])
def test_a_row_is_not_erased_where_its_gradients_are_small(name: str):
    """Adam's step size is unbounded there; without a limit one step of the prior would set the row to zero."""
    p = nn.Parameter(torch.ones(2, 3, dtype=torch.float64))
    optimizer = STEADY[name]([p])
    for _ in range(3):
        p.grad = torch.tensor([[1e-12] * 3, [1.0] * 3], dtype=torch.float64)
        optimizer.step()
    before = p.detach().clone()
    apply_prior(optimizer, {p: torch.ones(()).double()}, 0.1)
    moved = (p.detach() - before).norm(dim=1) / before.norm(dim=1)
    torch.testing.assert_close(moved[0], torch.tensor(0.01).double())
    assert 0 < moved[1] < 0.01


@pytest.mark.parametrize("prior", [apply_prior, add_prior_gradient])
def test_what_has_no_precision_or_no_gradient_is_left_alone(prior: Callable[..., None]):
    covered, free, idle = weight(1.0), weight(1.0), weight(1.0)
    optimizer = torch.optim.SGD([covered, free, idle], lr=0.1)
    covered.grad, free.grad = torch.ones_like(covered), torch.ones_like(free)
    prior(optimizer, {covered: torch.ones(1).double(), idle: torch.ones(1).double()}, 1.0)
    assert free.item() == idle.item() == 1
    assert free.grad.item() == 1
    assert idle.grad is None
    assert covered.item() < 1 or covered.grad.item() > 1


def test_each_parameter_group_has_its_own_step():
    slow, fast = weight(1.0), weight(1.0)
    optimizer = torch.optim.SGD([{"params": [slow], "lr": 0.1}, {"params": [fast], "lr": 0.4, "momentum": 0.5}], lr=1)
    slow.grad, fast.grad = torch.zeros_like(slow), torch.zeros_like(fast)
    apply_prior(optimizer, {slow: torch.ones(1).double(), fast: torch.ones(1).double()}, 1.0)
    assert slow.item() == pytest.approx(1 / 1.1)
    assert fast.item() == pytest.approx(1 / 1.8)


# The gradient ----------------------------------------------------------------------------------------------------


def test_the_gradient_is_that_of_the_penalised_loss():
    generator = torch.Generator().manual_seed(0)
    model = nn.Linear(3, 2).double()
    x = torch.randn(5, 3, generator=generator, dtype=torch.float64)
    delta = {p: 10 * torch.rand(p.shape, generator=generator, dtype=torch.float64) for p in model.parameters()}
    penalty = sum((0.5 * 0.03 * d * p * p).sum() for p, d in delta.items())
    expected = torch.autograd.grad(model(x).square().mean() + penalty, list(model.parameters()))
    model(x).square().mean().backward()
    add_prior_gradient(torch.optim.SGD(model.parameters(), lr=0.1), delta, 0.03)
    for p, g in zip(model.parameters(), expected, strict=True):
        torch.testing.assert_close(p.grad, g)


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_gradient_of_a_huge_precision_does_not_diverge(momentum: float):
    p = weight(1.0, -2.0)
    optimizer = torch.optim.SGD([p], lr=0.1, momentum=momentum)
    for _ in range(300):
        p.grad = torch.zeros_like(p)
        add_prior_gradient(optimizer, {p: torch.tensor([1e12, 1e4], dtype=torch.float64)}, 0.01)
        optimizer.step()
    assert p.abs().max().item() < 1e-5


# A gradient scaler -----------------------------------------------------------------------------------------------


def scaled(value: float) -> tuple[nn.Parameter, Optimizer, Any]:
    """A loss ``value`` · θ, scaled and differentiated."""
    p = weight(1.0, 2.0, dtype=torch.float32)
    optimizer, scaler = torch.optim.SGD([p], lr=0.1), torch.amp.GradScaler("cpu", init_scale=1024.0)
    scaler.scale((value * p).sum()).backward()
    return p, optimizer, scaler


def test_a_scaled_step_is_taken():
    p, optimizer, scaler = scaled(3.0)
    assert take_step(optimizer, scaler)
    torch.testing.assert_close(p.detach(), torch.tensor([0.7, 1.7]))


def test_a_step_with_infinite_gradients_is_skipped():
    p, optimizer, scaler = scaled(math.inf)
    assert not take_step(optimizer, scaler)
    assert torch.equal(p.detach(), torch.tensor([1.0, 2.0]))
    scaler.update()
    assert scaler.get_scale() == 512, "the scaler has noticed"


def test_a_disabled_scaler_is_none():
    p, optimizer, _ = scaled(3.0)
    p.grad = torch.ones_like(p)
    assert take_step(optimizer, torch.amp.GradScaler("cpu", enabled=False))
    torch.testing.assert_close(p.detach(), torch.tensor([0.9, 1.9]))


def test_gradients_are_unscaled_once():
    p, optimizer, scaler = scaled(3.0)
    for _ in range(2):  # the second time, as after the user's own unscale_ for clipping, there is nothing to do
        unscale(optimizer, scaler)
        torch.testing.assert_close(p.grad, torch.tensor([3.0, 3.0]))
    assert take_step(optimizer, scaler)
    torch.testing.assert_close(p.detach(), torch.tensor([0.7, 1.7]))


def test_weights_without_gradient_end_at_zero_and_not_among_subnormal_numbers():
    """Half of a weight at each step is subnormal after 126 of them, where a processor is many times slower."""
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    spam = shaver.SpaM(model, 10, initial_precision=100.0, total_steps=1000, burn_in=0.5)
    for _ in range(150):
        optimizer.zero_grad()
        F.cross_entropy(model(torch.zeros(4, 3)), torch.tensor([0, 1, 0, 1])).backward()
        spam.step(optimizer)
    assert torch.equal(model.weight, torch.zeros(2, 3))
    assert bool((model.bias.abs() >= torch.finfo(torch.float32).tiny).logical_or(model.bias == 0).all())
