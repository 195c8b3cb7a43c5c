"""``fit``: MAP, L1 and SpaM training as one call."""

import os
import warnings
from collections.abc import Mapping
from typing import Any

from torch import nn

from shaver.batches import check_network
from shaver.files import checkpoints
from shaver.io import check_folder
from shaver.naming import check_count, check_name, check_number
from shaver.pruning import Masks, Schedule
from shaver.training.history import History, open_logger
from shaver.training.options import Options, options_with
from shaver.training.progress import TrainingProgress
from shaver.training.randomness import own_randomness
from shaver.training.run import Run
from shaver.training.sources import open_source
from shaver.training.spreading import refuse_wrapped

METHODS = ("spam", "map", "l1")


def fit(
    model: nn.Module,
    train: Any,
    valid: Any = None,
    *,
    method: str = "spam",
    epochs: int = 30,
    lr: float | None = None,
    batch_size: int = 128,
    spam: Mapping[str, Any] | None = None,
    masks: Masks | None = None,
    online: Schedule | None = None,
    seed: int = 0,
    folder: str | os.PathLike[str] | None = None,
    options: Options | None = None,
    **more: Any,
) -> History:
    """Train a network in place. With a ``folder``, a killed run can be resumed and gives the same numbers.

    Example:
        >>> history = shaver.fit(model, train, valid, epochs=30, folder="runs/lenet")
        >>> scores = shaver.score(model, "opd", posterior=history.posterior)

    The loss is the mean negative log likelihood of a batch. ``"map"`` is ordinary training: it adds the Gaussian prior
    as weight decay. ``"l1"`` adds λ‖θ‖₁ as a proximal step (exact zeros, see
    :func:`shaver.training.lasso.soft_threshold`). ``"spam"`` learns the prior from the evidence during training (see
    :class:`shaver.SpaM`).

    Under ``torchrun`` the same call trains in all processes together and gives the same numbers as one process. Each
    process takes its part of every batch, or its own batches from a loader with a ``DistributedSampler``. Only the
    first process writes files and shows the progress bar.

    Args:
        model: The network, trained in place on its device. Its mode does not change; gradients are cleared.
        train: Data with ``.batches()`` (:mod:`shaver.data`), a DataLoader, or any re-iterable of batches.
        valid: Validation data in the same forms. Loss and accuracy are recorded; they do not affect training.
        method: ``"spam"``, ``"map"`` or ``"l1"``.
        epochs: Passes over the training data.
        lr: Learning rate of a named optimizer. Default: 0.05 for SGD and 0.001 for Adam.
        batch_size: Samples per batch, for data with ``.batches()``.
        spam: Further arguments of :class:`shaver.SpaM`, such as ``{"prior": "unit"}``.
        masks: Keep these weights zero, also against momentum and weight decay: for fine-tuning after
            :func:`shaver.prune`.
        online: Prune during training, along a schedule: ``shaver.pruning.Online(0.99)`` removes weights,
            ``shaver.structure.Gradual(0.8, example=x)`` removes whole units (with the unit prior, unless ``spam`` names
            another).
        seed: Seed of everything random in training. The global random state does not change.
        folder: Folder for checkpoints, ``history.csv`` and, after SpaM, the posterior. Default: nothing is written.
            A run is resumed if settings, data and initial weights are those of the run that wrote the checkpoint.
        options: Optimizer, likelihood, schedule, weight decay, clipping, mixed precision, progress bar, logger, …
        **more: Any of the :class:`~shaver.training.Options` by name, such as ``optimizer="adam"``,
            ``likelihood="regression"`` or ``progress=False``.

    Returns:
        One row per epoch, and the posterior if the method is SpaM.

    Raises:
        Diverged: A number is not finite; ``folder`` still has the last good checkpoint.
        ValueError: Settings do not fit together, or ``folder`` has a checkpoint of another run.

    Warns:
        UserWarning: The network ended with the same outputs for every sample; ``history.dead`` says so too.
    """
    options = options_with(options, more)
    check_network(model, "fit")
    refuse_wrapped(model)
    epochs, batch_size = check_count("epochs", epochs), check_count("batch_size", batch_size)
    seed = check_count("seed", seed, least=0)
    lr = None if lr is None else check_number("lr", lr, least=0, above=True)
    check_name("method", method, METHODS)
    settings = {"method": method, "epochs": epochs, "lr": lr, "batch_size": batch_size, "seed": seed}
    _check_pruning(model, masks, online)
    spam = _check_method(method, spam, online, options)
    if options.logger == "tensorboard" and folder is None:
        raise ValueError('logger="tensorboard" needs a folder to write into.')
    modes = {module: module.training for module in model.modules()}
    with own_randomness(seed):
        train_source = open_source(train, "train", batch_size, shuffle=True, seed=seed)
        valid_source = None if valid is None else open_source(valid, "valid", batch_size, shuffle=False)
        run = Run(model, train_source, valid_source, settings, options)
        place = None if folder is None else check_folder(folder)
        run.prepare(spam, masks, online, place)
        shown = options.progress if run.spread.first else False
        if shown is None and options.logger is not None:
            shown = False
        try:
            with (
                TrainingProgress(method, epochs, train_source.count, run.epoch, shown=shown) as bar,
                open_logger(options.logger if run.spread.first else None, place, run.epoch) as sink,
            ):
                while not run.finished:
                    row = run.train_epoch(bar)
                    if sink is not None:
                        sink.log(row, row["epoch"])
        finally:
            for module, mode in modes.items():
                module.training = mode
            run.release()
    history = run.history
    history.masks = run.masks
    if run.spam is not None:
        history.posterior = run.spam.posterior
        if place is not None and run.spread.first:
            history.posterior.save(place / checkpoints.POSTERIOR)
    run.spread.ranks.wait()  # until the first rank has written its files
    if history.dead and run.spread.first:
        warnings.warn(
            f"after {len(history)} epochs the network gives every sample the same outputs: its units have died, and it "
            "has learned nothing from its input. A smaller lr or clip=1.0 usually helps.",
            stacklevel=2,
        )
    return history


def _check_method(
    method: str, spam: Mapping[str, Any] | None, online: Schedule | None, options: Options
) -> dict[str, Any]:
    """Refuse options that do not fit the method. Returns the options of SpaM, with defaults from ``online``."""
    if spam is not None and not isinstance(spam, Mapping):
        raise TypeError(f'spam takes a dict of SpaM\'s options, such as {{"prior": "unit"}}, not {spam!r}.')
    if method != "spam" and (spam or options.early_stopping):
        raise ValueError(f'spam= and early_stopping are for method="spam"; this is method={method!r}.')
    if method == "spam" and options.teacher is not None:
        raise ValueError('teacher= works only with method="map" or "l1": SpaM\'s evidence does not include a teacher.')
    if online is not None and options.early_stopping:
        raise ValueError(
            "online pruning reaches its target at a set time, so it cannot be combined with early_stopping."
        )
    defaults = online.spam_defaults if online is not None and method == "spam" else {}
    return {**defaults, **(spam or {})}


def _check_pruning(model: nn.Module, masks: object, online: object) -> None:
    """Refuse masks of another network and wrong types, before anything is changed."""
    if masks is not None and online is not None:
        raise ValueError("masks= holds given masks and online= makes its own; give one of them.")
    if masks is not None:
        if not isinstance(masks, Masks):
            raise TypeError(
                f"masks= takes shaver.pruning.Masks, such as the masks of what shaver.prune returns, not a "
                f"{type(masks).__name__}; shaver.pruning.Masks({{name: tensor}}) makes them of boolean tensors."
            )
        masks.parameters(model)
    if online is not None and not isinstance(online, Schedule):
        raise TypeError(
            f"online= takes shaver.pruning.Online(sparsity, …) or shaver.structure.Gradual(…), not {online!r}."
        )
