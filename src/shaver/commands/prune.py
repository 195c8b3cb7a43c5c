"""``shaver prune``: read a trained network, prune it, measure it before and after, and write a smaller file."""

import copy
from dataclasses import asdict

from rich.console import Console

from shaver import criteria
from shaver.commands.options import LAYERS, UNITS, PruneOptions
from shaver.commands.outcome import PRUNING, measure_network, show_and_write
from shaver.commands.subject import Subject, check_held_out, criterion_of, how_to_give_data, prepare
from shaver.likelihoods import Classification
from shaver.pruning import Pruned, prune
from shaver.repairing import output_damage
from shaver.structure.scores import DAMAGE


def run_prune(options: PruneOptions, console: Console) -> Pruned:
    """Prune a network as the options say, print the result, and write it if a folder is given."""
    subject = _prepare(options)
    model = subject.model
    posterior = subject.posterior(console, "--sparsity auto" if options.sparsity == "auto" else None)
    with console.status(f"Scoring by {subject.criterion} …"):
        if subject.criterion == DAMAGE:
            scores = output_damage(model, **subject.scoring())
        else:
            scores = criteria.score(model, subject.criterion, posterior=posterior, **subject.scoring())
    with console.status("Measuring the network as it is …"):
        rows = {"before": measure_network(model, subject)}
    calibration = subject.calibration() if options.repair else None
    plain = None if calibration is None else copy.deepcopy(model)
    with console.status("Pruning …" if calibration is None else "Pruning and repairing …") as status:
        valid = subject.data.valid if subject.data is not None and options.max_drop is not None else None
        pruned = prune(
            model,
            scores,
            options.sparsity,
            scope=options.scope or "global",
            cap=options.cap,
            minimum=options.minimum,
            posterior=posterior,
            valid=None if valid is None else valid.batches,
            max_drop=options.max_drop,
            calibration=calibration,
            passes=options.passes,
            progress=lambda done, total: status.update(f"Pruning and repairing … {done} of {total} steps"),
        )
    with console.status("Measuring the pruned network …"):
        rows["after"] = measure_network(model, subject)
        if plain is not None:
            pruned.masks.apply_(plain)
            rows["unrepaired"] = measure_network(plain, subject)
    console.print(str(pruned), highlight=False, markup=False)
    report = {
        "criterion": "evidence" if options.sparsity == "auto" else subject.criterion,
        "scope": options.scope or "global",
        "requested": pruned.requested,
        "achieved": pruned.achieved,
        "evidence_change": pruned.evidence_change,
        "loss_rise": pruned.loss_rise,
        "layers": [asdict(layer) for layer in pruned.layers],
    }
    show_and_write(subject, console, model, rows, report, PRUNING, pruned.masks)
    return pruned


def _prepare(options: PruneOptions) -> Subject:
    """Check the options, then read the network and the data."""
    needless = [option for name, option in options.changed().items() if name in ("windows", "length", "column")]
    needless += [f"--scope {options.scope}"] if options.scope in (UNITS, LAYERS) else []
    if needless:
        raise ValueError(
            f"{', '.join(needless)} is for causal language models: give --calibration FILE. `shaver compact` removes "
            "units of other networks."
        )
    criterion = criterion_of(options)
    if options.sparsity == "auto" and criterion != "opd":
        raise ValueError(f"--sparsity auto ranks weights by the evidence; leave out --criterion {criterion}.")
    if options.sparsity is None and options.max_drop is None and ":" not in (options.scope or ""):
        raise ValueError(
            "say how much to remove: --sparsity 0.95, --sparsity auto, --scope 2:4, or --max-drop 0.01 with --data."
        )
    if options.max_drop is not None and options.data is None:
        raise ValueError(f"--max-drop needs validation data: {how_to_give_data()}.")
    if options.max_drop is not None and ":" not in str(options.data):
        check_held_out(options)
    subject = prepare(options, valid_fraction=options.valid_fraction or 0.0)
    if options.max_drop is not None and not isinstance(subject.likelihood, Classification):
        raise ValueError("--max-drop is a loss of accuracy, which a regression does not have; give --sparsity.")
    if options.max_drop is not None and subject.data is not None and subject.data.valid is None:
        raise ValueError(f"--max-drop needs validation data, and --data {options.data} has no .valid.")
    return subject
