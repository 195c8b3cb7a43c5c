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
    Lightning's checkpoints contain the state, and ``trainer.fit(lit, loader, ckpt_path=…)`` continues to the same
    numbers. Set the optimizer's weight decay to 0: the prior takes its place (``weight_decay=`` of SpaM).

    Args:
        module: The submodule that ``training_step`` calls and that gets the prior, such as ``"net"``. None: the
            LightningModule itself, for a ``training_step`` that calls ``self(x)``.
        data_size: N, the number of training samples; None means the length of the training loader's data set.
        total_steps: Number of optimizer steps in training; None means the Trainer's estimate.
        options: Everything else :class:`shaver.SpaM` takes: ``prior="unit"``, ``source="ef"``, ``likelihood=…``.

    Attributes:
        spam: The :class:`shaver.SpaM` in use; None before training begins.
    """

    def __init__(
        self,
        module: str | None = None,
        *,
        data_size: int | None = None,
        total_steps: int | None = None,
        **options: Any,
    ) -> None:
        if options.get("structure", "diag") != "diag" or options.get("online") is False:
            raise ValueError(
                "the callback learns online, during the training steps; for structure='kron' or online=False use "
                "shaver.SpaM in your own loop, or shaver.fit."
            )
        self.module, self.data_size, self.total_steps = module, data_size, total_steps
        self.options = options
        self.spam: SpaM | None = None
        self._waiting: dict[str, Any] | None = None  # the state of a checkpoint, until there is a SpaM to load it
        self._steps = 0
        self._unstepped = False

    @property
    def posterior(self) -> Any:
        """The posterior at the current weights, for ``shaver.score(…, "opd", posterior=…)``."""
        return self._at_work().posterior

    # Lightning's side ------------------------------------------------------------------------------------------

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Attach to the network and the optimizers, and restore the state of a checkpoint."""
        if self.spam is not None:  # a second fit continues with the state of the first
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
        """Remember that a step follows; a gradient scaler may still skip it."""
        self._unstepped = True
        self._steps = self._at_work().steps

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Discard the measurement of a step that a gradient scaler skipped; fail if the network is never called."""
        spam = self._at_work()
        if self._unstepped and spam.steps == self._steps:
            spam.observe(_scale(trainer))
        self._unstepped = False
        if spam.steps == 1 and not spam.statistics():
            where = "self(x)" if self.module is None else f"self.{self.module}(x)"
            raise RuntimeError(
                f"training_step did not call {where} in the first step, so SpaM could not measure its curvature. Name "
                'the submodule that it calls: SpaMCallback(module="net").'
            )

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Log SpaM's statistics."""
        pl_module.log_dict({f"spam/{name}": value for name, value in self._at_work().statistics().items()})

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Remove the hooks; the posterior stays available."""
        self._at_work().close()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Remove the hooks."""
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
            raise RuntimeError("SpaMCallback has not been used in a training yet: pass it to Trainer(callbacks=[…]).")
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
                f"under {type(trainer.strategy).__name__} training_step runs inside the module's own forward, so SpaM "
                'needs a submodule: put the network into one and pass SpaMCallback(module="net").'
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
    """The process group; each process wraps the whole module, and SpaM uses a part of it."""
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
