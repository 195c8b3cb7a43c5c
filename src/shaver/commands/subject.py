"""What a command works on: a trained network, its data, an input, its posterior and scores."""

import math
import re
from dataclasses import dataclass
from itertools import islice
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

import shaver.data
from shaver import criteria
from shaver.batches import batch_size_of
from shaver.commands.options import NetworkOptions, PruneOptions
from shaver.curvature import estimate
from shaver.evidence import Posterior, fit_prior
from shaver.files import TrainedNetwork, load_trained
from shaver.files.saved import PLAN
from shaver.files.trained import read_network
from shaver.likelihoods import Classification, Likelihood, get_likelihood
from shaver.measure.evaluating import evaluating
from shaver.measure.example import Example, call
from shaver.naming import check_count, import_function
from shaver.pruning.ranking import check_sparsity
from shaver.structure.scores import DAMAGE
from shaver.training.sources import Source, open_source

_BATCH = 256
#: Training samples that a repair is calibrated with.
CALIBRATION = 2048


@dataclass(frozen=True)
class Data:
    """The data that the network is scored with and measured on, each part in batches."""

    title: str  # of the test data, for tables
    train: Source  # training data
    valid: Source | None  # validation data, if there are any
    test: Source  # test data


@dataclass(frozen=True)
class Subject:
    """A trained network, with everything needed to score and measure it."""

    options: NetworkOptions  # what the user asked for
    criterion: str  # how units or weights are ranked
    trained: TrainedNetwork  # the network, and what is known of its training
    likelihood: Likelihood  # what its outputs mean
    data: Data | None  # its data, if they were given
    example: Example | None  # an input, if there are data or its shape was given

    @property
    def model(self) -> nn.Module:
        """The network."""
        return self.trained.model

    def posterior(self, console: Console, wanted: str | None = None) -> Posterior | None:
        """The posterior that the criterion or the option ``wanted`` needs: SpaM's, or one that is estimated now."""
        if wanted is None and (self.criterion == DAMAGE or "posterior" not in criteria.needs(self.criterion)):
            return None
        with console.status("Reading or estimating the posterior …"):
            posterior, is_learned = self._read_or_estimate(wanted or f"--criterion {self.criterion}")
        console.print(_origin(posterior, is_learned), highlight=False)
        if wanted is not None and not is_learned:
            raise ValueError(
                "δ was not learned with these weights, so the evidence says little about how many can be removed: "
                f"--max-drop 0.01 decides by validation data instead of {wanted}."
            )
        return posterior

    def _read_or_estimate(self, wanted: str) -> tuple[Posterior, bool]:
        """The posterior, and whether its δ was learned."""
        options, trained, data = self.options, self.trained, self.data
        if trained.posterior is not None and options.prior_precision is None:
            return trained.posterior, True
        if trained.method == "spam" and options.prior_precision is None:
            raise ValueError(
                f"{wanted} needs the posterior, which shaver.fit writes when a SpaM run is finished, and for these "
                "weights there is none: call shaver.fit again to finish the run, or estimate one with --data and "
                "--prior-precision."
            )
        if data is None:
            raise ValueError(
                f"{wanted} needs a posterior, and {options.checkpoint} has none: to estimate one, "
                f"{how_to_give_data()}. Or choose --criterion magnitude, which needs nothing."
            )
        fraction = None
        if options.samples is not None and options.samples < data.train.data_size:
            fraction = options.samples / data.train.data_size
        curvature = estimate(self.model, data.train.batches, self.likelihood, fraction=fraction, seed=options.seed)
        if options.prior_precision is None:
            return fit_prior(self.model, curvature), False
        return Posterior(curvature, options.prior_precision, self.model), False

    def calibration(self) -> list[Any] | None:
        """Training batches for the repair, about :data:`CALIBRATION` samples; None without data."""
        if self.data is None:
            return None
        batches: list[Any] = []
        samples = 0
        for batch in self.data.train.batches:
            batches.append(batch)
            samples += batch_size_of(batch)
            if samples >= CALIBRATION:
                break
        return batches

    def scoring(self) -> dict[str, Any]:
        """What the criterion needs beside the model and a posterior, as arguments of :func:`shaver.score`."""
        if self.criterion == DAMAGE:
            return {"batches": self.calibration()}
        chosen, data, samples = criteria.get(self.criterion), self.data, self.options.samples
        given: dict[str, Any] = {"likelihood": self.likelihood, "seed": self.options.seed}
        takes_example = "example" in chosen.needs
        if takes_example or "batches" in chosen.needs:
            if data is not None and samples is None:
                given["batches"] = data.train.batches
            elif data is not None and samples is not None:  # whole batches of a shuffled order
                share = samples / data.train.data_size
                given["batches"] = list(islice(data.train.batches, max(1, math.ceil(share * data.train.count))))
            elif takes_example and self.example is not None:
                given["example"] = self.example
            else:
                shape = " Or give --input-shape, such as --input-shape 1 28 28." if takes_example else ""
                raise ValueError(f"--criterion {chosen.name} needs data: {how_to_give_data()}.{shape}")
        return given


def prepare(options: NetworkOptions, *, valid_fraction: float = 0.0) -> Subject:
    """Check the options, then read the network and the data, and check that they match."""
    if isinstance(options.sparsity, float | int):
        check_sparsity(options.sparsity)
    out = options.out
    if out is not None and out.exists() and not (out / PLAN).exists() and (not out.is_dir() or any(out.iterdir())):
        raise ValueError(
            f"--out {out} exists and holds something else; choose a new folder, or one that --out wrote before."
        )
    if options.samples is not None:
        check_count("--samples", options.samples)
    if options.prior_precision is not None and not 0 < options.prior_precision < math.inf:
        raise ValueError(f"--prior-precision must be positive and finite, not {options.prior_precision}.")
    trained = load_trained(options.checkpoint, options.factory)
    likelihood = _likelihood(options, trained)
    data = None if options.data is None else _open_data(options.data, options, valid_fraction)
    example = _example(options, data)
    if example is not None:
        _check_fits(trained.model, example, "--input-shape" if data is None else f"--data {options.data}")
    return Subject(options, criterion_of(options), trained, likelihood, data, example)


def check_held_out(options: PruneOptions) -> None:
    """Refuse to choose a sparsity by samples that the network was trained on."""
    fraction = options.valid_fraction
    held = f"shaver.data.load({options.data!r}, valid_fraction=0.1)"
    if not fraction:
        raise ValueError(
            f"--max-drop needs samples that training did not see. If the network was trained on the .train of {held}, "
            "say --valid-fraction 0.1. If it was trained on all samples, train it again on that .train, or give "
            "--sparsity instead."
        )
    trained = re.match(r"(\d+) samples", str(read_network(options.checkpoint).config.get("data", "")))
    splits: Any = shaver.data.load(str(options.data), seed=options.data_seed, valid_fraction=fraction)
    if trained is not None and int(trained[1]) != len(splits.train):
        raise ValueError(
            f"the network was trained on {trained[1]} samples, but --valid-fraction {fraction:g} of {options.data} "
            f"leaves {len(splits.train)}: --max-drop would measure on samples that training saw. Train on {held}, or "
            "give --sparsity."
        )


def criterion_of(options: NetworkOptions) -> str:
    """The criterion's name. Imports the modules that the options name first, because they may register it."""
    for option, spec in (("--factory", options.factory), ("--data", options.data)):
        if spec is not None and ":" in spec:
            import_function(spec, option)
    if options.passes and (options.data is None or not options.repair):
        raise ValueError(f"--passes {options.passes} belong to the repair, which needs data: {how_to_give_data()}.")
    if options.criterion != DAMAGE:
        return criteria.get(options.criterion or "opd").name
    if options.data is None:
        raise ValueError(f"--criterion {DAMAGE} needs data: {how_to_give_data()}.")
    return DAMAGE


def how_to_give_data() -> str:
    """The advice in errors about missing data."""
    names = ", ".join(name for name in shaver.data.names() if name != "imdb")
    return f"give --data NAME ({names}), or --data package.module:function for your own"


def _likelihood(options: NetworkOptions, trained: TrainedNetwork) -> Likelihood:
    if options.likelihood is not None:
        return get_likelihood(options.likelihood)
    if isinstance(trained.likelihood, str) and options.data is not None:
        raise ValueError(
            f"the run was trained with the likelihood {trained.likelihood}, which cannot be rebuilt from its name: "
            "give --likelihood classification or regression, or use shaver.score and shaver.prune in Python."
        )
    return trained.likelihood if isinstance(trained.likelihood, Likelihood) else Classification()


def _open_data(spec: str, options: NetworkOptions, valid_fraction: float) -> Data:
    """A data set of shaver by name, or what a user's function returns."""
    if ":" in spec:
        parts, title = import_function(spec, "--data")(), f"test data of {spec}"
        missing = [part for part in ("train", "test") if not hasattr(parts, part)]
        if missing:
            raise ValueError(f"--data {spec} returned a {type(parts).__name__} without .{' and .'.join(missing)}.")
    elif spec == "imdb":
        raise ValueError("imdb is text, which needs a tokenizer; --data package.module:function can give its batches.")
    else:
        parts = shaver.data.load(spec, seed=options.data_seed, valid_fraction=valid_fraction)
        title = f"{spec}, test split" + (f" of seed {options.data_seed}" if spec in ("cancer", "digits") else "")
    valid = getattr(parts, "valid", None)
    return Data(
        title,
        open_source(parts.train, "train", _BATCH, shuffle=options.samples is not None, seed=options.seed),
        None if valid is None else open_source(valid, "valid", _BATCH, shuffle=False),
        open_source(parts.test, "test", _BATCH, shuffle=False),
    )


def _example(options: NetworkOptions, data: Data | None) -> Example | None:
    """One input: the first of the test data, or zeros of the shape given."""
    if data is None:
        return torch.zeros(1, *options.input_shape) if options.input_shape else None
    batch = next(iter(data.test.batches))
    if isinstance(batch, tuple | list):
        inputs = tuple(part[:1] for part in batch[:-1])
        return inputs[0] if len(inputs) == 1 else inputs
    return {key: value[:1] for key, value in batch.items()}


def shape_of(example: Example | None) -> list[int] | None:
    """The shape of one sample, for networks with a single input that is not a row of tokens."""
    if isinstance(example, Tensor) and example.is_floating_point():
        return list(example.shape[1:])
    return None


def _check_fits(model: nn.Module, example: Example, option: str) -> None:
    try:
        with evaluating(model):
            call(model, example)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{option} does not fit {type(model).__name__}: {error}") from error


def _origin(posterior: Posterior, is_learned: bool) -> str:
    """A sentence that says where a posterior comes from."""
    if is_learned:
        return "Posterior: the one saved with the network."
    found = torch.cat([delta.reshape(-1) for delta in posterior.delta().values()])
    low, high = float(found.min()), float(found.max())
    if low == high:
        return f"Posterior: from the curvature at these weights, under an assumed prior precision of {low:g}."
    return (
        "Posterior: from the curvature at these weights, with the prior precision of each layer chosen by the evidence "
        f"({low:.3g} to {high:.3g})."
    )
