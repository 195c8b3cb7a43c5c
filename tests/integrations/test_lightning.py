"""SpaM as a Lightning callback: the same numbers as the plain loop, resumed from Lightning's own checkpoints."""

import logging
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

pl = pytest.importorskip("lightning.pytorch")

from shaver.integrations.lightning import SpaMCallback  # noqa: E402
from shaver.spam import SpaM  # noqa: E402

N, BATCH = 90, 16  # the last batch is smaller
QUICK: dict[str, Any] = {"every": 2, "decay": 0.8, "update": 3, "burn_in": 0.0, "freeze": 0.7}


@pytest.fixture(autouse=True)
def _quiet() -> None:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 3, (N,), generator=generator)
    x = torch.randn(N, 6, generator=generator)
    x[:, 0] += 2.0 * (y == 1)
    x[:, 1] += 2.0 * (y == 2)
    return TensorDataset(x, y)


def loader() -> DataLoader[tuple[Tensor, ...]]:
    return DataLoader(data(), batch_size=BATCH)


def mlp() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


class Lit(pl.LightningModule):
    """Calls a submodule, or itself."""

    def __init__(self, inner: bool = True, optimizer: Any = None) -> None:
        super().__init__()
        self.net, self.inner = mlp(), inner
        self.make = optimizer or (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def training_step(self, batch: Any, index: int) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.net(x) if self.inner else self(x), y)

    def configure_optimizers(self) -> Any:
        optimizer = self.make(self.parameters())
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)]


def trainer(callback: SpaMCallback, folder: Path, epochs: int = 3, **options: Any) -> Any:
    settings: dict[str, Any] = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_checkpointing": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
    }
    return pl.Trainer(max_epochs=epochs, callbacks=[callback], default_root_dir=folder, **(settings | options))


def plain_loop(
    epochs: int = 3, accumulate: int = 1, clip: float | None = None, make: Any = None, **options: Any
) -> tuple[nn.Module, SpaM]:
    model = mlp()
    batches = list(loader())
    steps = -(-len(batches) // accumulate)
    spam = SpaM(model, N, total_steps=epochs * steps, **QUICK, **options)
    optimizer = make(model.parameters()) if make else torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.8)
    for _ in range(epochs):
        for start in range(0, len(batches), accumulate):
            optimizer.zero_grad()
            for x, y in batches[start : start + accumulate]:
                (F.cross_entropy(model(x), y) / accumulate).backward()
            if clip:
                nn.utils.clip_grad_norm_(model.parameters(), clip)
            spam.step(optimizer)
        schedule.step()
    return model, spam


def assert_same(callback: SpaMCallback, net: nn.Module, model: nn.Module, spam: SpaM) -> None:
    assert callback.spam is not None
    assert callback.spam.updates == spam.updates > 1
    for (name, a), b in zip(net.named_parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7, msg=name)
    found, expected = callback.posterior.precision(), spam.posterior.precision()
    for (_, a), b in zip(found.items(), expected.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("inner", [True, False])
@pytest.mark.parametrize(
    ("options", "trainer_options", "loop_options"),
    [
        ({}, {}, {}),
        ({"source": "ef", "prior": "layer"}, {}, {}),
        ({"proximal": False}, {"gradient_clip_val": 0.3}, {"clip": 0.3}),
        ({}, {"accumulate_grad_batches": 2}, {"accumulate": 2}),
        ({"source": "ef"}, {"accumulate_grad_batches": 2, "gradient_clip_val": 0.3}, {"accumulate": 2, "clip": 0.3}),
    ],
    ids=["defaults", "ef", "gradient-clipped", "accumulated", "both"],
)
def test_the_callback_is_the_plain_loop(
    tmp_path: Path, inner: bool, options: Any, trainer_options: Any, loop_options: Any
):
    lit, callback = Lit(inner), SpaMCallback(module="net" if inner else None, **QUICK, **options)
    trainer(callback, tmp_path, **trainer_options).fit(lit, loader())
    model, spam = plain_loop(**loop_options, **options)
    assert_same(callback, lit.net, model, spam)
    assert not [hook for m in lit.modules() for hook in (*m._forward_hooks, *m._forward_pre_hooks)]


def test_adam_too(tmp_path: Path):
    make = lambda p: torch.optim.Adam(p, lr=0.01)  # noqa: E731
    lit, callback = Lit(optimizer=make), SpaMCallback("net", **QUICK)
    trainer(callback, tmp_path).fit(lit, loader())
    assert_same(callback, lit.net, *plain_loop(make=make))


def test_lbfgs_minimises_the_loss_with_the_prior_in_it(tmp_path: Path):
    """δ held: after enough steps the gradient of loss + prior vanishes, which the gradient of the loss does not."""
    whole = DataLoader(data(), batch_size=N)
    options: dict[str, Any] = {"total_steps": 10**6, "initial_precision": 3.0}
    make = lambda p: torch.optim.LBFGS(p, max_iter=20, line_search_fn="strong_wolfe")  # noqa: E731
    lit, callback = Lit(optimizer=make), SpaMCallback("net", **options)
    trainer(callback, tmp_path, epochs=15).fit(lit, whole)
    x, y = data()[:]
    lit.zero_grad()
    F.cross_entropy(lit.net(x), y).backward()
    for p in lit.net.parameters():
        assert p.grad is not None
        assert p.grad.abs().max() > 1e-3
        torch.testing.assert_close(p.grad, -3.0 * p.detach() / N, rtol=1e-2, atol=2e-5)


@pytest.mark.parametrize("source", ["mc", "ef"])
def test_a_resumed_run_gives_the_same_numbers(tmp_path: Path, source: str):
    through, whole = Lit(), SpaMCallback("net", source=source, total_steps=24, **QUICK)
    trainer(whole, tmp_path, epochs=4).fit(through, loader())
    first, before = Lit(), SpaMCallback("net", source=source, total_steps=24, **QUICK)
    begun = trainer(before, tmp_path, epochs=2)
    begun.fit(first, loader())
    begun.save_checkpoint(tmp_path / "half.ckpt")
    second, after = Lit(), SpaMCallback("net", source=source, total_steps=24, **QUICK)
    trainer(after, tmp_path, epochs=4).fit(second, loader(), ckpt_path=tmp_path / "half.ckpt")
    assert before.spam is not None
    assert after.spam is not None
    assert whole.spam is not None
    assert before.spam.updates < after.spam.updates == whole.spam.updates
    for a, b in zip(second.net.parameters(), through.net.parameters(), strict=True):
        assert torch.equal(a, b)
    for name, a in after.spam.prior.delta().items():
        assert torch.equal(a, whole.spam.prior.delta()[name])
    assert after.spam.statistics() == whole.spam.statistics()


def test_statistics_are_logged(tmp_path: Path):
    callback = SpaMCallback("net", **QUICK)
    ran = trainer(callback, tmp_path)
    ran.fit(Lit(), loader())
    assert callback.spam is not None
    expected = callback.spam.statistics()
    assert expected
    for name, value in expected.items():
        assert float(ran.callback_metrics[f"spam/{name}"]) == pytest.approx(value, rel=1e-5)


def test_a_step_that_never_calls_the_module_is_an_error_at_once(tmp_path: Path):
    with pytest.raises(RuntimeError, match=r'SpaMCallback\(module="net"\)'):
        trainer(SpaMCallback(**QUICK), tmp_path).fit(Lit(inner=True), loader())


def test_bad_input_is_named(tmp_path: Path):
    with pytest.raises(ValueError, match="no submodule 'nett'; its children are 'net'"):
        trainer(SpaMCallback("nett"), tmp_path).fit(Lit(), loader())
    with pytest.raises(ValueError, match=r"data_size"):
        trainer(SpaMCallback("net"), tmp_path).fit(Lit(), list(loader()))
    with pytest.raises(ValueError, match="learns online"):
        SpaMCallback("net", structure="kron")
    with pytest.raises(RuntimeError, match="has not been used in a training"):
        _ = SpaMCallback("net").posterior
    with pytest.raises(ValueError, match="SpaM option"):
        trainer(SpaMCallback("net", evry=3), tmp_path).fit(Lit(), loader())


def test_without_lightning_the_extra_is_named(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delitem(sys.modules, "shaver.integrations.lightning")
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(ImportError, match=r"shaver\[lightning\]"):
        import shaver.integrations.lightning  # noqa: F401
