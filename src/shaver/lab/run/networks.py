"""Trained networks, kept once for all recipes: trained when they are missing, continued after an interruption."""

import shutil
import time
from collections.abc import Callable
from copy import copy
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import nn

import shaver.data
import shaver.zoo
from shaver.criteria import prunable
from shaver.curvature import estimate
from shaver.data import Batches, InMemory
from shaver.evidence import Posterior
from shaver.io import load_state, read_json, save_state, write_json
from shaver.lab.recipes.grid import Training
from shaver.lab.recipes.language import Reviews, build_network, load_reviews, warm_up
from shaver.lab.recipes.recipe import RIVALS, SCHEDULES
from shaver.lab.run.rivals import train_rival
from shaver.pruning import Masks, Online
from shaver.training import History, Options, fit
from shaver.training.lasso import search_l1

#: The files of a trained network; :func:`shaver.files.load_trained` reads the first two.
MODEL, POSTERIOR, HISTORY = "model.safetensors", "model-posterior.safetensors", "history.csv"
FILES = (MODEL, POSTERIOR, HISTORY)
_DONE = "training.json"
_CHECKPOINTS = "checkpoints"

#: ``report(note, done, of)``: what a cell is doing, and how far it is.
Report = Callable[[str, int, int], None]


@dataclass(frozen=True)
class CachedNetwork:
    """A trained network of the store."""

    model: nn.Module  # the network, in evaluation mode
    posterior: Posterior  # SpaM's; for MAP and L1 one from a curvature estimate after training, under the prior of MAP
    # train_seconds, posterior_seconds (of an estimate after training), epochs, code, and l1
    # or online where they apply
    facts: dict[str, Any]


def load_data(training: Training) -> shaver.data.Splits:
    """The data of a training, cut to its number of samples; the test part is whole unless they are texts."""
    asked = training.data
    if "length" in asked:
        return load_reviews(training.network, asked)
    splits: shaver.data.Splits = shaver.data.load(asked["name"], seed=asked["seed"], augment=asked["augment"])
    if asked["samples"] is None or asked["samples"] >= len(splits.train):
        return splits
    whole = splits.train
    order = torch.randperm(len(whole), generator=torch.Generator().manual_seed(0))[: asked["samples"]]
    part = copy(whole)
    part.inputs, part.targets = whole.inputs[order], whole.targets[order]
    return replace(splits, train=part)


def scored_batches(data: shaver.data.Splits) -> Batches:
    """The batches for criteria: the training data, or some texts in small batches, because texts are expensive."""
    if isinstance(data, Reviews):
        part = slice(data.scored)
        return InMemory(data.train.inputs[part], data.train.targets[part], classes=data.classes).batches(8)
    return data.train.batches(256, augment=False)


def obtain(
    training: Training, data: shaver.data.Splits, store: Path, *, code: str, any_code: bool, report: Report
) -> tuple[CachedNetwork, Path]:
    """The trained network and its folder in the store; it is trained now unless it is there.

    A second process waits for the first one. A network that other code trained is trained again.
    """
    folder = store / training.key
    store.mkdir(parents=True, exist_ok=True)
    lock = FileLock(store / f"{training.key}.lock")
    try:
        held = lock.acquire(timeout=0)
    except Timeout:
        report("waiting for another process that trains this network", 0, training.fit["epochs"])
        held = lock.acquire()
    with held:
        facts = _facts(folder)
        if facts is None or not (any_code or facts["code"] == code):
            facts = _train(training, data, folder, code, any_code, report)
        saved = load_state(folder / MODEL)
        model = build_network(**saved["network"])
        model.load_state_dict(saved["weights"])
        return CachedNetwork(model.eval(), Posterior.load(folder / POSTERIOR), facts), folder


def is_trained(store: Path, training: Training) -> bool:
    """Whether a network is in the store, by whatever code."""
    return (store / training.key / _DONE).is_file()


def _facts(folder: Path) -> dict[str, Any] | None:
    """What is known about a finished network; ``None`` if it is not finished, or damaged."""
    if not all((folder / name).is_file() for name in (_DONE, *FILES)):
        return None
    try:
        facts: dict[str, Any] = read_json(folder / _DONE)
        load_state(folder / MODEL)
    except ValueError:
        return None
    return facts


def _train(
    training: Training, data: shaver.data.Splits, folder: Path, code: str, any_code: bool, report: Report
) -> dict[str, Any]:
    config = folder / "config.json"
    begun = read_json(config) if config.is_file() else {}
    resume = any_code or begun.get("code") == code
    (folder / _DONE).unlink(missing_ok=True)
    write_json(config, {**asdict(training), "code": code})
    options = dict(training.fit)
    epochs, seed = options["epochs"], options["seed"]
    options["options"] = _prior(training, data, options.pop("precision", 1.0))
    if "schedule" in options:
        options["schedule"] = SCHEDULES[options["schedule"]]
    pruning = options.pop("online", {})
    place = folder / _CHECKPOINTS
    facts: dict[str, Any] = {"code": code, "epochs": epochs}
    if options["method"] == "l1" and options["l1"] is None:
        options["l1"] = facts["l1"] = _coefficient(training, place / "search", report)
    model = build_network(**training.network, seed=seed)
    if options["method"] in RIVALS:
        history = _train_rival(training, model, data, _Epochs(report, epochs))
    else:
        history = fit(
            model,
            data.train,
            data.test if training.curves else None,
            online=None if training.online is None else Online(training.online, **pruning),
            folder=place / "run",
            resume=resume,
            logger=_Epochs(report, epochs),
            **options,
        )
    report("curvature", epochs, epochs)
    began = time.perf_counter()
    posterior = _posterior(training, model, history, data)
    facts |= {
        "train_seconds": sum(history.column("seconds")),
        "posterior_seconds": time.perf_counter() - began,
        "online": None if history.masks is None else history.masks.sparsity,
    }
    arguments = shaver.zoo.arguments_of(model)
    save_state(folder / MODEL, {"network": arguments, "weights": model.state_dict()})
    posterior.save(folder / POSTERIOR)
    history.to_csv(folder / HISTORY)
    write_json(folder / _DONE, facts)
    shutil.rmtree(place, ignore_errors=True)  # the checkpoints are no longer needed
    return facts


def _train_rival(training: Training, model: nn.Module, data: shaver.data.Splits, logger: "_Epochs") -> History:
    """Train by another paper's method; the masks are its zeros."""
    options, history = training.fit, History()
    clock = [time.perf_counter()]

    def told(epoch: int, loss: float) -> None:
        clock.append(time.perf_counter())
        history.append({"epoch": epoch, "loss": loss, "seconds": clock[-1] - clock[-2]})
        logger.log(history[-1], epoch)

    batches = data.train.batches(options["batch_size"], shuffle=True, seed=options["seed"])
    train_rival(options["method"], model, batches, epochs=options["epochs"], seed=options["seed"], told=told)
    history.masks = Masks({name: weight.detach() != 0 for name, weight in prunable(model).items()})
    return history


def _prior(training: Training, data: shaver.data.Splits, precision: float) -> Options:
    """MAP's Gaussian prior against data that count 1/T times; the other methods bring their own.

    Language models also get what fine-tuning is known to need: a warm-up, and gradients of at most unit norm.
    """
    map_prior = training.fit["method"] == "map"
    options = Options(weight_decay=precision * training.temperature / len(data.train) if map_prior else None)
    return replace(options, schedule=warm_up, clip=1.0) if isinstance(data, Reviews) else options


def _posterior(training: Training, model: nn.Module, history: History, data: shaver.data.Splits) -> Posterior:
    """At the final weights: SpaM's own if its curvature is up to date, else with a new estimate."""
    spam = training.fit.get("spam")
    if spam is not None and spam.get("online", True):
        assert history.posterior is not None
        return history.posterior
    structure = "diag" if spam is None else spam["structure"]
    source = training.source if spam is None else spam["source"]
    model.eval()
    batches, most = data.train.batches(256, augment=False), None
    if isinstance(data, Reviews):
        batches, most = data.train.batches(training.fit["batch_size"]), min(data.scored, len(data.train))
    curvature = estimate(
        model, batches, structure=structure, source=source, seed=training.fit["seed"], max_samples=most
    )
    delta = 1.0 if history.posterior is None else history.posterior.delta()
    return Posterior(curvature, delta, dict(model.named_parameters()), training.temperature)


def _coefficient(training: Training, folder: Path, report: Report) -> float:
    """λ by a search with a third of the epochs, on a tenth of the training data that the search does not see."""
    options = {name: value for name, value in training.fit.items() if name not in ("method", "l1", "epochs")}
    epochs = max(1, training.fit["epochs"] // 3)
    asked = training.data
    splits = shaver.data.load(asked["name"], seed=asked["seed"], augment=asked["augment"], valid_fraction=0.1)
    found = search_l1(
        lambda: shaver.zoo.build(**training.network),
        splits.train,
        splits.valid,
        epochs=epochs,
        folder=folder,
        logger=_Epochs(report, epochs, "searching λ"),
        **options,
    )
    return found.coefficient


class _Epochs:
    """Turns the rows of training into reports."""

    def __init__(self, report: Report, epochs: int, what: str = "training") -> None:
        self._report, self._epochs, self._what = report, epochs, what

    def log(self, row: dict[str, Any], step: int) -> None:
        self._report(f"{self._what}, loss {row['loss']:.3f}", step, self._epochs)
