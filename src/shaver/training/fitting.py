"""``fit``: MAP, L1 and SpaM training as one call."""

import os
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from shaver.batches import Forward, Targets, forward_of, targets_of
from shaver.files import checkpoints
from shaver.likelihoods import Likelihood, get_likelihood
from shaver.naming import check_name
from shaver.training.history import History, Logger
from shaver.training.holding import check_masks, fingerprint
from shaver.training.optimizers import OptimizerLike
from shaver.training.options import Options
from shaver.training.progress import Progress
from shaver.training.randomness import own_randomness
from shaver.training.run import Run
from shaver.training.sources import open_source
from shaver.training.spreading import refuse_wrapped

if TYPE_CHECKING:
    from shaver.pruning import Masks, Online
    from shaver.structure import Gradual

METHODS = ("spam", "map", "l1")


def fit(
    model: nn.Module,
    train: Any,
    valid: Any = None,
    *,
    method: str = "spam",
    epochs: int = 30,
    optimizer: OptimizerLike = "sgd",
    lr: float | None = None,
    batch_size: int = 128,
    likelihood: str | Likelihood = "classification",
    l1: float = 1e-4,
    spam: Mapping[str, Any] | None = None,
    masks: "Masks | None" = None,
    online: "Online | Gradual | None" = None,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    resume: bool = True,
    progress: bool = False,
    logger: Logger | str | None = None,
    forward: Forward = forward_of,
    targets: Targets = targets_of,
    options: Options | None = None,
) -> History:
    """Train a network in place; with a ``folder``, a killed run continues where it was, to the same numbers.

    Example:
        >>> history = shaver.fit(model, train, valid, epochs=30, folder="runs/lenet")  # doctest: +SKIP
        >>> scores = shaver.score(model, "opd", posterior=history.posterior)           # doctest: +SKIP

    The loss is the mean negative log likelihood of a batch. ``"map"`` adds the Gaussian prior as weight decay,
    ``"l1"`` adds λ‖θ‖₁ as a proximal step (exact zeros, see :func:`shaver.training.lasso.soft_threshold`), and
    ``"spam"`` learns the prior from the evidence on the way (see :class:`shaver.SpaM`).

    Under ``torchrun`` the same call trains in all processes together, to the numbers of one: each takes its part of
    every batch (a loader with a ``DistributedSampler`` gives each its own), and the first one writes and shows.

    Args:
        model: Trained in place, on the device it is on. Its mode is left as found; gradients are cleared.
        train: Data with ``.batches()`` (:mod:`shaver.data`), a DataLoader, or any re-iterable of batches.
        valid: The same for validation: its loss and accuracy are recorded, nothing is chosen by them.
        method: ``"spam"``, ``"map"`` or ``"l1"``.
        epochs: Passes over the training data.
        optimizer: ``"sgd"`` (momentum 0.9), ``"adam"``, ``"adamw"``, a function of the parameters, or an optimizer.
        lr: Learning rate of a named optimizer; ``None`` is 0.05 for SGD and 0.001 for Adam.
        batch_size: For data that make their own batches.
        likelihood: ``"classification"``, ``"regression"`` or a :class:`shaver.likelihoods.Likelihood`.
        l1: λ, for ``"l1"`` alone; :func:`shaver.training.search_l1` looks for it.
        spam: Further arguments of :class:`shaver.SpaM`, such as ``{"prior": "unit"}``.
        masks: Hold these zeros, momentum and weight decay included: fine-tuning of what :func:`shaver.prune` left.
        online: Prune while training, along a schedule: ``shaver.pruning.Online(0.99)`` weights, or
            ``shaver.structure.Gradual(0.8, example=x)`` whole units, with the unit prior unless ``spam`` names one.
        seed: Of everything random in training. The user's own random numbers are not disturbed.
        folder: Where checkpoints, ``history.csv`` and, at the end of SpaM, the posterior go. ``None`` keeps nothing.
        resume: Continue from the newest checkpoint in ``folder``; ``False`` removes what is there.
        progress: Show a bar.
        logger: Gets every row as ``log(row, epoch)``; ``"tensorboard"`` writes into ``folder/tensorboard``.
        forward: ``forward(model, batch)``, for batches that are neither tuples nor dicts.
        targets: ``targets(batch)``, likewise.
        options: Schedule, weight decay, clipping, accumulation, mixed precision, early stopping.

    Returns:
        One row an epoch, and the posterior if the method is SpaM.

    Raises:
        Diverged: A number stopped being finite; the last good checkpoint is left in ``folder``.
        ValueError: Settings that do not go together, or a checkpoint of another run in ``folder``.
    """
    options = options or Options()
    check_name("method", method, METHODS)
    if epochs < 1:
        raise ValueError(f"epochs must be 1 or more, not {epochs!r}.")
    if method != "spam" and (spam or options.early_stopping):
        raise ValueError(f'spam= and early_stopping are for method="spam"; this is method={method!r}.')
    if method == "spam" and options.weight_decay:
        raise ValueError(
            f"SpaM's prior takes the place of weight decay, so weight_decay={options.weight_decay!r} does not go with "
            'method="spam"; spam={"initial_precision": …} sets where the prior starts.'
        )
    refuse_wrapped(model)
    _check_pruning(model, masks, online, options)
    if method == "spam":  # structured pruning has a prior of its own to prefer
        spam = {**getattr(online, "spam_defaults", {}), **(spam or {})}
    if not l1 >= 0:
        raise ValueError(f"l1 must be zero or positive, not {l1!r}.")
    if logger == "tensorboard" and folder is None:
        raise ValueError('logger="tensorboard" needs a folder to write into.')
    modes = {module: module.training for module in model.modules()}
    with own_randomness(seed):
        train_source = open_source(train, "train", batch_size, shuffle=True, seed=seed)
        valid_source = None if valid is None else open_source(valid, "valid", batch_size, shuffle=False)
        config = {
            "method": method,
            "epochs": epochs,
            "optimizer": optimizer,
            "lr": lr,
            "batch_size": batch_size,
            "likelihood": likelihood if isinstance(likelihood, str) else type(likelihood),
            "l1": l1 if method == "l1" else None,
            "spam": dict(spam or {}),
            "masks": None if masks is None else fingerprint(masks),
            "online": None if online is None else vars(online),
            "seed": seed,
            **asdict(options),
            "data": f"{train_source.data_size} samples in {train_source.count} batches",
            "network": {name: "×".join(map(str, p.shape)) or "scalar" for name, p in model.named_parameters()},
        }
        run = Run(model, train_source, valid_source, get_likelihood(likelihood), forward, targets, config, options)
        place = None if folder is None else Path(folder)
        run.prepare(optimizer, lr, dict(spam or {}), masks if masks is not None else online, place, resume)
        try:
            with (
                Progress(method, epochs, train_source.count, run.epoch, shown=progress and run.spread.first) as bar,
                run.sink(logger if run.spread.first else None) as sink,
            ):
                while not run.finished:
                    row = run.train_epoch(bar)
                    if sink is not None:
                        sink.log(row, row["epoch"])
        finally:
            for module, mode in modes.items():
                module.training = mode
            run.release()
    run.history.masks = None if run.pruning is None else run.pruning.masks
    if run.spam is not None:
        run.history.posterior = run.spam.posterior
        if place is not None and run.spread.first:
            run.history.posterior.save(place / checkpoints.POSTERIOR)
    run.spread.ranks.wait()  # what the first rank wrote is there for all
    return run.history


def _check_pruning(model: nn.Module, masks: object, online: object, options: Options) -> None:
    """Refuse what cannot be, before anything is changed."""
    if masks is not None and online is not None:
        raise ValueError("masks= holds given masks and online= makes its own; give one of them.")
    if masks is not None:
        check_masks(masks, model)
    if online is not None and not hasattr(online, "begin"):
        raise TypeError(
            f"online= takes shaver.pruning.Online(target, …) or shaver.structure.Gradual(…), not {online!r}."
        )
    if online is not None and options.early_stopping:
        raise ValueError("online pruning reaches its target at a set time, so early_stopping does not go with it.")
