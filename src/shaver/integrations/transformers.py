"""SpaM as a callback of the transformers library's Trainer: ``Trainer(…, callbacks=[SpaMCallback()])``."""

from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from shaver.closures import inner_optimizer, scale_of
from shaver.evidence import Posterior
from shaver.settings import FINE_TUNING, Settings
from shaver.spam import SpaM

try:
    from transformers import TrainerCallback
except ImportError as error:
    raise ImportError('this callback needs the transformers library: pip install "shaver[transformers]".') from error

#: The key of SpaM's state in the optimizer's first parameter group.
KEY = "shaver.spam"


class SpaMCallback(TrainerCallback):  # type: ignore[misc]
    """Learns the prior while the Trainer trains; every optimizer step is a :meth:`shaver.SpaM.step`.

    Example:
        >>> callback = SpaMCallback()
        >>> trainer = Trainer(model, args, train_dataset=data, callbacks=[callback])
        >>> trainer.train()
        >>> scores = shaver.score(model, "opd", posterior=callback.posterior)

    The callback uses the model's own loss: classification, or causal language modelling with shifted labels and
    ignored positions. Gradient accumulation, mixed precision, clipping, warm-up and any optimizer work as they do
    without SpaM. A sample is one row of the batch, that is, one sequence.

    The Trainer's checkpoints contain the state as part of the optimizer state, and
    ``trainer.train(resume_from_checkpoint=…)`` continues to the same numbers. Leave weight decay at 0: the prior
    takes its place.

    Args:
        data_size: N, the number of training samples; None means the length of the training data set.
        total_steps: Number of optimizer steps in training; None means the Trainer's estimate.
        logger: Receives log evidence, effective parameters and the other statistics, which are also in the Trainer's
            log under ``spam/``: anything with ``log(dict, step)``, such as the run of a tracker.
        settings: How δ is learned. The default preserves pretrained weights. When you train from scratch, pass
            ``settings=shaver.settings.Settings()``, which prunes further.
        options: Everything else :class:`shaver.SpaM` takes: ``prior="unit"``, ``source="ef"``, ``update=100``.

    Attributes:
        spam: The :class:`shaver.SpaM` in use; None before training begins.
    """

    def __init__(
        self,
        *,
        data_size: int | None = None,
        total_steps: int | None = None,
        logger: Any = None,
        settings: Settings = FINE_TUNING,
        **options: Any,
    ) -> None:
        if options.get("structure", "diag") != "diag" or not options.get("online", settings.online):
            raise ValueError(
                "the callback learns online, during the training steps; for structure='kron' or online=False use "
                "shaver.SpaM in your own loop."
            )
        self.data_size, self.total_steps, self.options = data_size, total_steps, options
        self.settings = settings
        self.logger = logger
        self.spam: SpaM | None = None
        self._handles: list[RemovableHandle] = []
        self._steps = 0

    @property
    def posterior(self) -> Posterior:
        """The posterior at the current weights, for ``shaver.score(…, "opd", posterior=…)``."""
        return self._at_work().posterior

    # The Trainer's side ----------------------------------------------------------------------------------------

    def on_train_begin(
        self, args: Any, state: Any, control: Any, model: Any = None, optimizer: Any = None, **known: Any
    ) -> None:
        """Attach to the model and the optimizer, and restore the state of a checkpoint."""
        tokenizer = known.get("processing_class")
        if tokenizer is not None:
            check_tokenizer(model, tokenizer)
        earlier = None
        if self.spam is not None:  # a second call of train() continues with the state of the first
            earlier = self.spam.state_dict()
            self._close()
        self.spam = SpaM(
            model,
            self.data_size or _data_size(known.get("train_dataloader")),
            total_steps=self.total_steps or state.max_steps or None,
            group=torch.distributed.group.WORLD if args.world_size > 1 else None,
            settings=self.settings,
            **self.options,
        )
        if earlier is not None:
            self.spam.load_state_dict(earlier)
        self._handles = carry(self.spam, inner_optimizer(optimizer))
        self.spam.attach(optimizer)
        self._steps = self.spam.steps

    def on_optimizer_step(self, args: Any, state: Any, control: Any, optimizer: Any = None, **known: Any) -> None:
        """Discard the measurement of a step that a gradient scaler skipped; fail early if the model is never called."""
        spam = self._at_work()
        if spam.steps == self._steps:
            spam.observe(scale_of(optimizer)())
        if spam.steps == 1 and not spam.statistics():
            raise RuntimeError(
                "the Trainer's first step did not call the model, so SpaM could not measure its curvature."
            )
        self._steps = spam.steps

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **known: Any) -> None:
        """Add SpaM's statistics to the Trainer's log."""
        if self.spam is not None and state.log_history and "loss" in state.log_history[-1]:
            found = {f"spam/{name}": value for name, value in self.spam.statistics().items()}
            state.log_history[-1].update(found)
            if logs is not None:
                logs.update(found)
            if self.logger is not None:
                self.logger.log(found, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, **known: Any) -> None:
        """Remove the hooks; the posterior stays available."""
        self._close()

    def _close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        self._at_work().close()

    def _at_work(self) -> SpaM:
        if self.spam is None:
            raise RuntimeError("SpaMCallback has not been used in a training yet: pass it to Trainer(callbacks=[…]).")
        return self.spam


def carry(spam: SpaM, optimizer: Optimizer) -> list[RemovableHandle]:
    """Store SpaM's state in the optimizer's state dict, for trainers that save only that.

    The state is an entry of the first parameter group. Torch keeps unknown entries when it loads a state dict, so the
    state is found whether the optimizer is loaded before or after this call.
    """

    def saved(optimizer: Optimizer, state: dict[str, Any]) -> None:
        state["param_groups"][0][KEY] = spam.state_dict()

    def loaded(optimizer: Optimizer) -> None:
        state = optimizer.param_groups[0].pop(KEY, None)
        if state is not None:
            spam.load_state_dict(state)

    loaded(optimizer)
    return [optimizer.register_state_dict_post_hook(saved), optimizer.register_load_state_dict_post_hook(loaded)]


def check_tokenizer(model: nn.Module, tokenizer: Any) -> None:
    """Check that every token has a row in the model's embedding, and that there is a pad token."""
    embeddings: Any = getattr(model, "get_input_embeddings", None)
    table: Any = embeddings() if embeddings is not None else None
    rows = getattr(table, "num_embeddings", None)
    if rows is None or not hasattr(tokenizer, "__len__"):
        return
    if len(tokenizer) > rows:
        raise ValueError(
            f"the tokenizer has {len(tokenizer)} tokens, but the model's embedding has {rows} rows: it belongs to "
            f"another model, or the model needs model.resize_token_embeddings({len(tokenizer)})."
        )
    if getattr(tokenizer, "pad_token_id", None) is None:
        raise ValueError(
            "the tokenizer has no pad token, so sequences of different lengths cannot form a batch. Set "
            "tokenizer.pad_token = tokenizer.eos_token, and for a classifier that reads the last token also "
            "model.config.pad_token_id = tokenizer.pad_token_id."
        )
    config: Any = getattr(model, "config", None)
    if getattr(config, "pad_token_id", None) is None and type(model).__name__.endswith("ForSequenceClassification"):
        raise ValueError(
            f"{type(model).__name__} has no pad token, so it cannot find the last token of a sequence. Set "
            f"model.config.pad_token_id = {tokenizer.pad_token_id}."
        )


def _data_size(loader: Any) -> int:
    try:
        return len(loader.dataset)
    except (AttributeError, TypeError) as error:
        raise ValueError(
            f"cannot tell how many training samples a {type(loader).__name__} holds; pass SpaMCallback(data_size=…)."
        ) from error
