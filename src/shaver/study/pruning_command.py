"""``shaver prune``: a trained network from a file, pruned, measured before and after, and written back smaller."""

import math
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

import shaver.data
from shaver import criteria
from shaver.curvature import estimate
from shaver.evidence import Posterior
from shaver.io import write_json
from shaver.likelihoods import Classification, Likelihood, get_likelihood
from shaver.measure import cost, quality
from shaver.measure.evaluating import evaluating
from shaver.measure.example import Example, call
from shaver.pruning import Pruned, prune, save
from shaver.pruning.files import PLAN
from shaver.pruning.ranking import check_sparsity
from shaver.study.pruning_options import PruningOptions
from shaver.study.pruning_table import before_and_after
from shaver.study.sweep import Row
from shaver.study.trained import Trained, import_function, load_trained
from shaver.training.sources import Source, open_source

REPORT = "pruning.json"
_BATCH = 256
_NO_DATA = "give --data NAME ({}), or --data package.module:function for your own"


@dataclass(frozen=True)
class Data:
    """What the network is scored with and measured on, each part in batches."""

    title: str
    train: Source
    valid: Source | None
    test: Source


@dataclass(frozen=True)
class _Setting:
    """What everything below looks at."""

    options: PruningOptions
    criterion: str
    trained: Trained
    likelihood: Likelihood
    data: Data | None
    example: Example | None

    @property
    def model(self) -> nn.Module:
        return self.trained.model


def run_prune(options: PruningOptions, console: Console) -> Pruned:
    """Prune a network as the options say, show what came of it, and write it if a folder is given.

    Raises:
        ValueError: An option is out of range, or something that it needs is missing; nothing is written then.
        OSError: A file cannot be read or written.
    """
    setting = _prepare(options)
    model = setting.model
    posterior = None
    if options.sparsity == "auto" or "posterior" in criteria.needs(setting.criterion):
        with console.status("Looking for the posterior …"):
            posterior, origin = _posterior(setting)
        console.print(f"Posterior: {origin}.", highlight=False)
    with console.status(f"Scoring by {setting.criterion} …"):
        scores = _scores(setting, posterior)
    with console.status("Measuring the network as it is …"):
        before = _measure(setting)
    with console.status("Pruning …"):
        valid = setting.data.valid if setting.data is not None and options.max_drop is not None else None
        pruned = prune(
            model,
            scores,
            options.sparsity,
            scope=options.scope,
            cap=options.cap,
            minimum=options.minimum,
            posterior=posterior,
            valid=None if valid is None else valid.batches,
            max_drop=options.max_drop,
        )
    with console.status("Measuring what is left …"):
        after = _measure(setting)
    console.print(str(pruned), highlight=False, markup=False)
    console.print(before_and_after(before, after, None if setting.data is None else setting.data.title))
    if options.out is not None:
        size = _write(options.out, setting, pruned, before, after)
        console.print(
            f"{size:,} bytes written to {options.out}; shaver.load reads them.", highlight=False, markup=False
        )
    return pruned


# What is asked for -------------------------------------------------------------------------------------------------


def _prepare(options: PruningOptions) -> _Setting:
    """Check the options that need nothing else, then read the network and the data, and see that they fit."""
    criterion = criteria.get(options.criterion or "opd").name
    if options.sparsity == "auto" and criterion != "opd":
        raise ValueError(f"--sparsity auto ranks weights by the evidence; leave out --criterion {criterion}.")
    if options.sparsity is None and options.max_drop is None and ":" not in options.scope:
        raise ValueError(
            "say how much to remove: --sparsity 0.95, --sparsity auto, --scope 2:4, or --max-drop 0.01 with --data."
        )
    if isinstance(options.sparsity, float | int):
        check_sparsity(options.sparsity)
    if options.max_drop is not None and options.data is None:
        raise ValueError(f"--max-drop needs validation data: {_how_to_give_data()}.")
    if options.samples is not None and options.samples < 1:
        raise ValueError(f"--samples must be 1 or more, not {options.samples}.")
    if options.prior_precision is not None and not 0 < options.prior_precision < math.inf:
        raise ValueError(f"--prior-precision must be positive and finite, not {options.prior_precision}.")
    if options.out is not None:
        _check_free(options.out)
    trained = load_trained(options.checkpoint, options.factory)
    likelihood = _likelihood(options, trained)
    if options.max_drop is not None and not isinstance(likelihood, Classification):
        raise ValueError("--max-drop is a loss of accuracy, which a regression does not have; give --sparsity.")
    data = None if options.data is None else _open_data(options.data, options)
    example = _example(options, data)
    if example is not None:
        _check_fits(trained.model, example, "--input-shape" if data is None else f"--data {options.data}")
    return _Setting(options, criterion, trained, likelihood, data, example)


def _how_to_give_data() -> str:
    return _NO_DATA.format(", ".join(name for name in shaver.data.names() if name != "imdb"))


def _check_free(out: Path) -> None:
    """Refuse a folder in which something else would be mixed up with the network."""
    if out.exists() and (not out.is_dir() or (any(out.iterdir()) and not (out / PLAN).exists())):
        raise ValueError(
            f"--out {out} exists and holds something else; choose a new folder, or one that --out wrote before."
        )


def _likelihood(options: PruningOptions, trained: Trained) -> Likelihood:
    if options.likelihood is not None:
        return get_likelihood(options.likelihood)
    if isinstance(trained.likelihood, str) and options.data is not None:
        raise ValueError(
            f"the run was trained with the likelihood {trained.likelihood}, which cannot be rebuilt from its name: "
            "give --likelihood classification or regression, or use shaver.score and shaver.prune in Python."
        )
    return trained.likelihood if isinstance(trained.likelihood, Likelihood) else Classification()


def _open_data(spec: str, options: PruningOptions) -> Data:
    """A data set of shaver by name, or what a user's function returns."""
    if ":" in spec:
        parts, title = import_function(spec, "--data")(), f"test data of {spec}"
        missing = [part for part in ("train", "test") if not hasattr(parts, part)]
        if missing:
            raise ValueError(f"--data {spec} returned a {type(parts).__name__} without .{' and .'.join(missing)}.")
    elif spec == "imdb":
        raise ValueError("imdb is text, which needs a tokenizer; --data package.module:function can give its batches.")
    else:
        fraction = options.valid_fraction
        if fraction is None:
            fraction = 0.1 if options.max_drop is not None else 0.0
        parts = shaver.data.load(spec, seed=options.data_seed, valid_fraction=fraction)
        title = f"{spec}, test split" + (f" of seed {options.data_seed}" if spec in ("cancer", "digits") else "")
    valid = getattr(parts, "valid", None)
    if valid is None and options.max_drop is not None:
        raise ValueError(f"--max-drop needs validation data, and --data {spec} has no .valid.")
    return Data(
        title,
        open_source(parts.train, "train", _BATCH, shuffle=options.samples is not None, seed=options.seed),
        None if valid is None else open_source(valid, "valid", _BATCH, shuffle=False),
        open_source(parts.test, "test", _BATCH, shuffle=False),
    )


def _example(options: PruningOptions, data: Data | None) -> Example | None:
    """One input: the first of the test data, or zeros of the shape given."""
    if data is None:
        return torch.zeros(1, *options.input_shape) if options.input_shape else None
    batch = next(iter(data.test.batches))
    if isinstance(batch, tuple | list):
        inputs = tuple(part[:1] for part in batch[:-1])
        return inputs[0] if len(inputs) == 1 else inputs
    return {key: value[:1] for key, value in batch.items()}


def _check_fits(model: nn.Module, example: Example, option: str) -> None:
    try:
        with evaluating(model):
            call(model, example)
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise ValueError(f"{option} does not fit {type(model).__name__}: {error}") from error


# What the criterion needs ------------------------------------------------------------------------------------------


def _posterior(setting: _Setting) -> tuple[Posterior, str]:
    """SpaM's own, or one from the curvature at the trained weights; and where it came from, in words."""
    options, trained, data = setting.options, setting.trained, setting.data
    wanted = "--sparsity auto" if options.sparsity == "auto" else f"--criterion {setting.criterion}"
    if trained.posterior is not None and options.prior_precision is None:
        return trained.posterior, "the one saved with the network"
    if trained.method == "spam" and options.prior_precision is None:
        raise ValueError(
            f"{wanted} needs the posterior, which shaver.fit writes when a SpaM run is finished, and for these weights "
            "there is none: call shaver.fit again to finish the run, or estimate one with --data and --prior-precision."
        )
    if data is None:
        raise ValueError(
            f"{wanted} needs a posterior, and {options.checkpoint} has none: to estimate one, {_how_to_give_data()}. "
            "Or choose --criterion magnitude, which needs nothing."
        )
    fraction = None
    if options.samples is not None and options.samples < data.train.data_size:
        fraction = options.samples / data.train.data_size
    curvature = estimate(setting.model, data.train.batches, setting.likelihood, fraction=fraction, seed=options.seed)
    precision = options.prior_precision or 1.0
    posterior = Posterior(curvature, precision, dict(setting.model.named_parameters()))
    return posterior, f"from the curvature at these weights, under a prior precision of {precision:g}"


def _scores(setting: _Setting, posterior: Posterior | None) -> dict[str, torch.Tensor]:
    chosen, data = criteria.get(setting.criterion), setting.data
    extra: dict[str, Any] = {}
    if "batches" in chosen.needs:
        if data is not None:
            extra["batches"] = _training_batches(data, setting.options.samples)
        elif chosen.example_suffices and setting.example is not None:
            extra["example"] = setting.example
        else:
            shape = " Or give --input-shape, such as --input-shape 1 28 28." if chosen.example_suffices else ""
            raise ValueError(f"--criterion {chosen.name} needs data: {_how_to_give_data()}.{shape}")
    return criteria.score(
        setting.model,
        chosen.name,
        posterior=posterior,
        likelihood=setting.likelihood,
        seed=setting.options.seed,
        **extra,
    )


def _training_batches(data: Data, samples: int | None) -> Iterable[Any]:
    """All of them, or the first of a shuffled order that hold about so many samples."""
    if samples is None:
        return data.train.batches
    share = samples / data.train.data_size
    return list(islice(data.train.batches, max(1, math.ceil(share * data.train.count))))


# What comes of it --------------------------------------------------------------------------------------------------


def _measure(setting: _Setting) -> Row:
    """Quality where there are data, size always, work and time where there is an input."""
    model, data = setting.model, setting.data
    row: Row = {}
    if data is not None:
        row |= quality(model, data.test.batches, likelihood=setting.likelihood).as_dict()
        del row["count"]
    parameters = list(model.parameters())
    row |= {
        "parameters": sum(p.numel() for p in parameters),
        "nonzeros": sum(int(p.detach().count_nonzero()) for p in parameters),
        "bytes_dense": sum(p.numel() * p.element_size() for p in [*parameters, *model.buffers()]),
    }
    with tempfile.TemporaryDirectory() as folder:  # what the files really take, headers and all
        row["bytes_stored"] = _size(save(model, folder))
    if setting.example is not None:
        measured = cost(model, setting.example).as_dict()
        row |= {key: measured[key] for key in ("flops", "flops_sparse", "latency_1", "latency_128")}
    return row


def _size(folder: Path) -> int:
    return sum(file.stat().st_size for file in folder.iterdir())


def _write(out: Path, setting: _Setting, pruned: Pruned, before: Row, after: Row) -> int:
    """Write network and report, and return the network's bytes; a new folder appears complete or not at all."""
    options = setting.options
    report = {
        "checkpoint": str(options.checkpoint),
        "criterion": "evidence" if options.sparsity == "auto" else setting.criterion,
        "scope": options.scope,
        "requested": pruned.requested,
        "achieved": pruned.achieved,
        "evidence_change": pruned.evidence_change,
        "loss_rise": pruned.loss_rise,
        "data": None if setting.data is None else setting.data.title,
        "before": before,
        "after": after,
        "layers": [asdict(layer) for layer in pruned.layers],
    }
    with _complete_folder(out) as folder:
        (folder / REPORT).unlink(missing_ok=True)  # rather none than that of the network before
        size = _size(save(setting.model, folder, pruned.masks))
        write_json(folder / REPORT, _finite(report))
    return size


@contextmanager
def _complete_folder(out: Path) -> Iterator[Path]:
    """A folder to write into that becomes ``out`` at the end; ``out`` itself if it holds an earlier network.

    That one is safe too: ``save`` replaces a network in one moment.
    """
    if (out / PLAN).exists():
        yield out
        return
    folder = out.parent / f".{out.name}.{os.getpid()}.part"
    folder.mkdir(parents=True)
    try:
        yield folder
        if out.exists():
            out.rmdir()  # it is empty, which was checked
        folder.rename(out)
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        raise


def _finite(value: Any) -> Any:
    """JSON has no infinity: what is not finite becomes null."""
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, tuple | list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
