"""``shaver prune``: a trained network from a file, pruned, measured before and after, and written back smaller."""

from dataclasses import asdict

from rich.console import Console

from shaver import criteria
from shaver.commands.outcome import check_free, complete_folder, finite, measure_network, size_of
from shaver.commands.pruning_options import PruningOptions
from shaver.commands.setting import (
    Setting,
    how_to_give_data,
    import_user_code,
    origin_of,
    posterior_of,
    prepare,
    scoring,
    shape_of,
)
from shaver.files import save
from shaver.io import write_json
from shaver.lab.report.comparison import before_and_after
from shaver.lab.run.sweep import Row
from shaver.likelihoods import Classification
from shaver.pruning import Pruned, prune
from shaver.pruning.ranking import check_sparsity

REPORT = "pruning.json"


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
            wanted = "--sparsity auto" if options.sparsity == "auto" else f"--criterion {setting.criterion}"
            posterior, is_learned = posterior_of(setting, wanted)
        console.print(origin_of(posterior, is_learned), highlight=False)
        if options.sparsity == "auto" and not is_learned:
            console.print(
                "δ was not learned with these weights, so that the evidence says little about how many can go; "
                "--max-drop 0.01 asks validation data instead.",
                style="yellow",
                highlight=False,
            )
    with console.status(f"Scoring by {setting.criterion} …"):
        scores = criteria.score(model, setting.criterion, posterior=posterior, **scoring(setting))
    with console.status("Measuring the network as it is …"):
        before = measure_network(model, setting)
    with console.status("Pruning …"):
        valid = setting.data.valid if setting.data is not None and options.max_drop is not None else None
        if valid is not None and options.valid_fraction is None and ":" not in str(options.data):
            console.print(
                f"Validation: {valid.data_size} of the training samples; if the network was trained on them, what they "
                "tell is too good (--valid-fraction says how many were held out).",
                highlight=False,
            )
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
        after = measure_network(model, setting)
    console.print(str(pruned), highlight=False, markup=False)
    console.print(before_and_after(before, after, None if setting.data is None else setting.data.title))
    if options.out is not None:
        size = _write(options, setting, pruned, before, after)
        console.print(
            f"{size:,} bytes written to {options.out}; shaver.load reads them.", highlight=False, markup=False
        )
    return pruned


def _prepare(options: PruningOptions) -> Setting:
    """Check what is asked for, then read the network and the data."""
    import_user_code(options)
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
        raise ValueError(f"--max-drop needs validation data: {how_to_give_data()}.")
    if options.out is not None:
        check_free(options.out)
    fraction = options.valid_fraction
    if fraction is None:
        fraction = 0.1 if options.max_drop is not None else 0.0
    setting = prepare(options, criterion, valid_fraction=fraction)
    if options.max_drop is not None and not isinstance(setting.likelihood, Classification):
        raise ValueError("--max-drop is a loss of accuracy, which a regression does not have; give --sparsity.")
    if options.max_drop is not None and setting.data is not None and setting.data.valid is None:
        raise ValueError(f"--max-drop needs validation data, and --data {options.data} has no .valid.")
    return setting


def _write(options: PruningOptions, setting: Setting, pruned: Pruned, before: Row, after: Row) -> int:
    """Write network and report, and return the network's bytes; a new folder appears complete or not at all."""
    assert options.out is not None
    report = {
        "checkpoint": str(options.checkpoint),
        "criterion": "evidence" if options.sparsity == "auto" else setting.criterion,
        "scope": options.scope,
        "requested": pruned.requested,
        "achieved": pruned.achieved,
        "evidence_change": pruned.evidence_change,
        "loss_rise": pruned.loss_rise,
        "input_shape": shape_of(setting.example),
        "data": None if setting.data is None else setting.data.title,
        "before": before,
        "after": after,
        "layers": [asdict(layer) for layer in pruned.layers],
    }
    with complete_folder(options.out) as folder:
        (folder / REPORT).unlink(missing_ok=True)  # rather none than that of the network before
        size = size_of(save(setting.model, folder, pruned.masks))
        write_json(folder / REPORT, finite(report))
    return size
