"""``shaver prune``: a trained network from a file, pruned, measured before and after, and written back smaller."""

import copy
from dataclasses import asdict

from rich.console import Console

from shaver import criteria
from shaver.commands.options import PruneOptions
from shaver.commands.outcome import (
    PRUNING,
    before_and_after,
    check_free,
    measure_network,
    quality_of,
    write_network,
)
from shaver.commands.subject import (
    Subject,
    calibration_of,
    check_held_out,
    how_to_give_data,
    import_user_code,
    origin_of,
    posterior_of,
    prepare,
    scoring,
    shape_of,
)
from shaver.lab.run.folder import Row
from shaver.likelihoods import Classification
from shaver.pruning import Pruned, prune
from shaver.pruning.ranking import check_sparsity


def run_prune(options: PruneOptions, console: Console) -> Pruned:
    """Prune a network as the options say, show what came of it, and write it if a folder is given.

    Raises:
        ValueError: An option is out of range, or something that it needs is missing; nothing is written then.
        OSError: A file cannot be read or written.
    """
    subject = _prepare(options)
    model = subject.model
    posterior = None
    if options.sparsity == "auto" or "posterior" in criteria.needs(subject.criterion):
        with console.status("Reading or estimating the posterior …"):
            wanted = "--sparsity auto" if options.sparsity == "auto" else f"--criterion {subject.criterion}"
            posterior, is_learned = posterior_of(subject, wanted)
        console.print(origin_of(posterior, is_learned), highlight=False)
        if options.sparsity == "auto" and not is_learned:
            raise ValueError(
                "δ was not learned with these weights, so the evidence says little about how many can be removed: "
                "--max-drop 0.01 decides by validation data instead of --sparsity auto."
            )
    with console.status(f"Scoring by {subject.criterion} …"):
        scores = criteria.score(model, subject.criterion, posterior=posterior, **scoring(subject))
    with console.status("Measuring the network as it is …"):
        before = measure_network(model, subject)
    calibration = calibration_of(subject)
    plain = None if calibration is None else copy.deepcopy(model)
    with console.status("Pruning …" if calibration is None else "Pruning and repairing …"):
        valid = subject.data.valid if subject.data is not None and options.max_drop is not None else None
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
            calibration=calibration,
        )
    with console.status("Measuring what is left …"):
        after = measure_network(model, subject)
        unrepaired = None
        if plain is not None:
            pruned.masks.apply_(plain)
            unrepaired = quality_of(plain, subject)
    console.print(str(pruned), highlight=False, markup=False)
    title = None if subject.data is None else subject.data.title
    console.print(before_and_after(before, after, title, unrepaired=unrepaired))
    if options.out is not None:
        size = _write(options, subject, pruned, (before, unrepaired, after))
        console.print(
            f"{size:,} bytes written to {options.out}; shaver.load reads them.", highlight=False, markup=False
        )
    return pruned


def _prepare(options: PruneOptions) -> Subject:
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
    if options.max_drop is not None and ":" not in str(options.data):
        check_held_out(options)
    subject = prepare(options, criterion, valid_fraction=options.valid_fraction or 0.0)
    if options.max_drop is not None and not isinstance(subject.likelihood, Classification):
        raise ValueError("--max-drop is a loss of accuracy, which a regression does not have; give --sparsity.")
    if options.max_drop is not None and subject.data is not None and subject.data.valid is None:
        raise ValueError(f"--max-drop needs validation data, and --data {options.data} has no .valid.")
    return subject


def _write(options: PruneOptions, subject: Subject, pruned: Pruned, measured: tuple[Row, Row | None, Row]) -> int:
    """Write network and report, and return the bytes of the network."""
    assert options.out is not None
    before, unrepaired, after = measured
    report = {
        "checkpoint": str(options.checkpoint),
        "criterion": "evidence" if options.sparsity == "auto" else subject.criterion,
        "scope": options.scope,
        "requested": pruned.requested,
        "achieved": pruned.achieved,
        "evidence_change": pruned.evidence_change,
        "loss_rise": pruned.loss_rise,
        "input_shape": shape_of(subject.example),
        "data": None if subject.data is None else subject.data.title,
        "before": before,
        "unrepaired": unrepaired,
        "after": after,
        "layers": [asdict(layer) for layer in pruned.layers],
    }
    return write_network(options.out, subject.model, report, PRUNING, pruned.masks)
