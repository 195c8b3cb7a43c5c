"""Loops of other kinds: the recipes of the documentation run, and closures do what the page says."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import shaver
from shaver.curvature import estimate
from shaver.spam import SpaM
from tests.integrations.ddp_cases import QUICK, blobs, mlp

PAGE = Path(__file__).parents[2] / "docs" / "guides" / "training.md"
UNUSUAL = PAGE.read_text(encoding="utf-8").split("## Unusual loops")[1]
BLOCKS = re.findall(r"```python\n(.*?)```", UNUSUAL, re.DOTALL)
TITLES = ["lbfgs", "together", "in turns", "further term", "joint", "attached", "ddp", "fsdp"]


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """A process group of one."""
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def names() -> dict[str, Any]:
    train_set = TensorDataset(*(part.float() if part.is_floating_point() else part for part in blobs()))
    loader = DataLoader(train_set, batch_size=11)
    return {
        "shaver": shaver,
        "torch": torch,
        "nn": nn,
        "F": F,
        "model": mlp(),
        "loader": loader,
        "train_set": train_set,
        "epochs": 60,
    }


def test_every_recipe_has_a_name():
    assert len(BLOCKS) == len(TITLES)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize("title", TITLES)
def test_the_recipe_runs_and_learns(title: str):
    scope = names()
    if title == "in turns":  # without a length, δ is learned after 1,500 steps at the latest
        scope["epochs"] = 420
    model = scope["model"]
    with torch.random.fork_rng():
        torch.manual_seed(0)
        before = F.cross_entropy(model(scope["train_set"].tensors[0]), scope["train_set"].tensors[1]).item()
        exec(compile(BLOCKS[TITLES.index(title)], str(PAGE), "exec"), scope)
    spam = scope["spam"]
    assert spam.updates >= 2
    assert all(torch.isfinite(d).all() for d in spam.prior.delta().values())
    assert any((d != 1).any() for d in spam.prior.delta().values())
    if title not in ("joint", "fsdp"):
        after = F.cross_entropy(model(scope["train_set"].tensors[0]), scope["train_set"].tensors[1]).item()
        assert after < before
    spam.close()


def test_the_joint_likelihood_is_the_sum_of_its_parts():
    """H of both heads is the classification's on its outputs plus the regression's on its own."""
    scope = names()
    with torch.random.fork_rng():
        torch.manual_seed(0)
        exec(compile(BLOCKS[TITLES.index("joint")], str(PAGE), "exec"), scope)
    heads, joint = scope["heads"].double(), scope["Joint"]()
    x, y = blobs()
    targets = torch.stack([y.double(), x[:, 0]], 1)
    found = estimate(heads, [(x, targets)], joint)
    labels = estimate(heads, [(x, y)], "classification", forward=lambda m, b: m(b[0])[:, :3])
    number = estimate(heads, [(x, x[:, :1])], "regression", forward=lambda m, b: m(b[0])[:, 3:])
    assert found.log_likelihood == pytest.approx(labels.log_likelihood + number.log_likelihood)
    for name, h in found.diagonal().items():
        torch.testing.assert_close(h, labels.diagonal()[name] + number.diagonal()[name])


# Closures --------------------------------------------------------------------------------------------------------


def closure_of(model: nn.Module, optimizer: torch.optim.Optimizer, calls: list[float]) -> Any:
    x, y = blobs()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        calls.append(loss.item())
        return loss

    return closure


def test_lbfgs_finds_the_minimum_of_loss_and_prior():
    model = mlp().double()
    spam = SpaM(model, 44, initial_precision=2.0, total_steps=10**6, temperature=1.0)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=30, line_search_fn="strong_wolfe")
    calls: list[float] = []
    for _ in range(20):
        spam.step(optimizer, closure=closure_of(model, optimizer, calls))
    assert len(calls) > 40
    x, y = blobs()
    objective = F.cross_entropy(model(x), y) + sum(p.square().sum() for p in model.parameters()) * 2.0 / 44 / 2
    for slope, p in zip(torch.autograd.grad(objective, list(model.parameters())), model.parameters(), strict=True):
        assert slope.abs().max() < 1e-5
        assert p.abs().max() > 1e-2


def test_the_loss_that_lbfgs_sees_holds_the_prior():
    model = mlp().double()
    spam = SpaM(model, 44, initial_precision=2.0, total_steps=10**6, temperature=1.0)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=1)
    calls: list[float] = []
    penalty = sum(float(p.detach().square().sum()) for p in model.parameters()) * 2.0 / 44 / 2
    seen = spam.step(optimizer, closure=closure_of(model, optimizer, calls))
    assert float(seen) == pytest.approx(calls[0] + penalty, rel=1e-12)


@pytest.mark.parametrize("source", ["ef", "mc"])
def test_only_the_first_evaluation_of_a_step_is_looked_at(source: str):
    model, twin = mlp().double(), mlp().double()
    spam = SpaM(model, 44, source=source, every=1)
    other = SpaM(twin, 44, source=source, every=1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    calls: list[float] = []
    spam.step(optimizer, closure=closure_of(model, optimizer, calls))
    assert len(calls) > 2
    plain = torch.optim.SGD(twin.parameters(), lr=0.1)
    closure_of(twin, plain, [])()
    other.step(plain)
    for name, h in spam.curvature.diagonal().items():
        torch.testing.assert_close(h, other.curvature.diagonal()[name])
    assert spam.curvature.log_likelihood == pytest.approx(other.curvature.log_likelihood)


def test_lbfgs_forgets_when_delta_changes():
    model = mlp().double()
    spam = SpaM(model, 44, every=1, update=2, burn_in=0)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=3)
    remembered = []
    for _ in range(4):
        spam.step(optimizer, closure=closure_of(model, optimizer, []))
        remembered.append(len(optimizer.state))
    assert remembered == [1, 0, 1, 0]


@pytest.mark.parametrize("proximal", [True, False])
def test_a_closure_that_is_called_once_is_an_ordinary_step(proximal: bool):
    models = [mlp().double(), mlp().double()]
    for model, closed in zip(models, (True, False), strict=True):
        spam = SpaM(model, 44, proximal=proximal, **QUICK)
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        closure = closure_of(model, optimizer, [])
        for _ in range(8):
            if closed:
                spam.step(optimizer, closure=closure)
            else:
                closure()
                spam.step(optimizer)
        assert spam.updates > 1
    for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_an_attached_optimizer_takes_the_step_by_itself_until_close():
    models = [mlp().double(), mlp().double()]
    for model, attached in zip(models, (True, False), strict=True):
        spam = SpaM(model, 44, **QUICK)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if attached:
            spam.attach(optimizer)
            spam.attach(optimizer)  # twice is once
        closure = closure_of(model, optimizer, [])
        for _ in range(8):
            closure()
            optimizer.step() if attached else spam.step(optimizer)
        steps = spam.steps
        spam.close()
        optimizer.step()
        assert spam.steps == steps == 8
    models_close = zip(models[0].parameters(), models[1].parameters(), strict=True)
    for a, b in models_close:
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-14)


def test_what_cannot_be_is_said():
    model = mlp()
    spam = SpaM(model, 44)
    lbfgs, sgd = torch.optim.LBFGS(model.parameters()), torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(
        TypeError, match=r"LBFGS evaluates the loss itself: call spam.step\(optimizer, closure=closure\)"
    ):
        spam.step(lbfgs)
    with pytest.raises(TypeError, match="one optimizer and no scaler"):
        spam.step(sgd, lbfgs, closure=lambda: None)
    with pytest.raises(TypeError, match="one optimizer and no scaler"):
        spam.step(sgd, closure=lambda: None, scaler=object())
    spam.attach(sgd)
    with pytest.raises(RuntimeError, match=r"call optimizer\.step\(\) itself"):
        spam.step(sgd)
    spam.close()
