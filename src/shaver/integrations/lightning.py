"""SpaM as a callback of Lightning's Trainer: ``Trainer(callbacks=[SpaMCallback()])``."""

import math
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from shaver.spam import SpaM

try:
    import lightning.pytorch as pl
except ImportError:
    try:
        import pytorch_lightning as pl  # type: ignore[import-not-found, no-redef]
    except ImportError as error:
        raise ImportError('this callback needs Lightning: pip install "shaver[lightning]".') from error


class SpaMCallback(pl.Callback):  # type: ignore[misc]
    """Learns the prior while Lightning trains; every optimizer step is a :meth:`shaver.SpaM.step`.

    Example:
        >>> callback = SpaMCallback(module="net")                 # training_step calls self.net(x)
        >>> trainer = pl.Trainer(max_epochs=30, callbacks=[callback])
        >>> trainer.fit(lit, loader)
        >>> scores = shaver.score(lit.net, "opd", posterior=callback.posterior)

    Automatic and manual optimization, gradient accumulation, clipping and mixed precision work as they do without it.
    Lightning's checkpoints hold the state, and ``trainer.fit(lit, loader, ckpt_path=…)`` goes on to the same numbers.
    Leave weight decay out of the optimizer: the prior takes its place.

    Args:
        module: The submodule that ``training_step`` calls and that gets the prior, such as ``"net"``. None: the
            LightningModule itself, for a ``training_step`` that calls ``self(x)``.
        data_size: N, the number of training samples; None: the length of the training loader's data set.
        total_steps: How many optimizer steps training takes; None: what the Trainer expects.
        log: Log evidence, effective parameters and the rest under ``spam/`` at the end of every epoch.
        options: Everything else :class:`shaver.SpaM` takes: ``prior="unit"``, ``source="ef"``, ``likelihood=…``.

    Attributes:
        spam: The :class:`shaver.SpaM` at work; None before training begins.
    """

    def __init__(
        self,
        module: str | None = None,
        *,
        data_size: int | None = None,
        total_steps: int | None = None,
        log: bool = True,
        **options: Any,
    ) -> None:
        if options.get("structure", "diag") != "diag" or options.get("online") is False:
            raise ValueError(
                "the callback learns online, from training's own passes; for structure='kron' or online=False use "
                "shaver.SpaM in a loop of your own, or shaver.fit."
            )
        self.module, self.data_size, self.total_steps, self.log = module, data_size, total_steps, log
        self.options = options
        self.spam: SpaM | None = None
        self._waiting: dict[str, Any] | None = None  # a checkpoint's state, until there is a SpaM to take it
        self._steps = 0
        self._unstepped = False

    @property
    def posterior(self) -> Any:
        """The posterior at the present weights, for ``shaver.score(…, "opd", posterior=…)``."""
        return self._at_work().posterior

    # Lightning's side ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the network and the optimizers, and take back what a checkpoint held."""
        if self.spam is not None:  # a second fit goes on with what the first one learned
            self._waiting = self._waiting or self.spam.state_dict()
            self.spam.close()
        size = self.data_size or _data_size(trainer)
        steps = self.total_steps or _total_steps(trainer)
        network = self._network(trainer, pl_module)
        self.spam = SpaM(network, size, total_steps=steps, group=_group(trainer), **self.options)
        if self._waiting is not None:
            self.spam.load_state_dict(self._waiting)
            self._waiting = None
        self.spam.attach(*trainer.optimizers, scale=lambda: _scale(trainer))
        self._steps = self.spam.steps

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Note that a step is coming; a gradient scaler may yet skip it."""
        self._unstepped = True
        self._steps = self._at_work().steps

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Drop what was seen of a step that a gradient scaler skipped, and complain early if nothing is ever seen."""
        spam = self._at_work()
        if self._unstepped and spam.steps == self._steps:
            spam.observe(_scale(trainer))
        self._unstepped = False
        if spam.steps == 1 and not spam.statistics():
            where = "self(x)" if self.module is None else f"self.{self.module}(x)"
            raise RuntimeError(
                f"training_step did not call {where} in the first step, so that SpaM saw nothing of it. Name the "
                'submodule that it calls: SpaMCallback(module="net").'
            )

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log what SpaM knows."""
        spam = self._at_work()
        if self.log:
            pl_module.log_dict({f"spam/{name}": value for name, value in spam.statistics().items()})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Take the hooks off; the posterior stays."""
        self._at_work().close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Take the hooks off."""
        if self.spam is not None:
            self.spam.close()

    def state_dict(self) -> dict[str, Any]:
        """For Lightning's checkpoint."""
        if self.spam is None:
            return self._waiting or {}
        return self.spam.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """From Lightning's checkpoint, which is read before training begins."""
        self._waiting = dict(state_dict) or None

    # What SpaM needs to know -----------------------------------------------------------------------------------

    def _at_work(self) -> SpaM:
        if self.spam is None:
            raise RuntimeError("SpaMCallback has not seen any training yet: pass it to Trainer(callbacks=[…]).")
        return self.spam

    def _network(self, trainer: Any, pl_module: Any) -> nn.Module:
        if self.module is not None:
            try:
                found = pl_module.get_submodule(self.module)
            except AttributeError as error:
                names = ", ".join(repr(name) for name, _ in pl_module.named_children()) or "none"
                raise ValueError(
                    f"{type(pl_module).__name__} has no submodule {self.module!r}; its children are {names}."
                ) from error
            assert isinstance(found, nn.Module)
            return found
        if trainer.strategy.model is not pl_module:
            raise ValueError(
                f"under {type(trainer.strategy).__name__} training_step runs inside the module's own forward, so that "
                'SpaM has to watch a submodule: put the network into one and pass SpaMCallback(module="net").'
            )
        assert isinstance(pl_module, nn.Module)
        return pl_module


def _data_size(trainer: Any) -> int:
    loader = trainer.train_dataloader
    if isinstance(loader, DataLoader):
        try:
            return len(loader.dataset)  # type: ignore[arg-type]
        except TypeError:
            pass
    raise ValueError(
        f"cannot tell how many training samples a {type(loader).__name__} holds; pass SpaMCallback(data_size=…)."
    )


def _total_steps(trainer: Any) -> int | None:
    expected = trainer.estimated_stepping_batches
    return int(expected) if math.isfinite(expected) and expected > 0 else None


def _group(trainer: Any) -> Any:
    """The ranks of several processes: each has wrapped the whole module, of which SpaM watches a part."""
    if trainer.world_size == 1:
        return None
    wrapper = trainer.strategy.model
    if not isinstance(wrapper, nn.parallel.DistributedDataParallel):
        raise ValueError(
            f"several processes under {type(trainer.strategy).__name__} are not supported; use strategy='ddp'."
        )
    return wrapper.process_group


def _scale(trainer: Any) -> float | None:
    scaler = getattr(trainer.precision_plugin, "scaler", None)
    return float(scaler.get_scale()) if scaler is not None else None
