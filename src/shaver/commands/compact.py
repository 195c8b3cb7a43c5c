"""``shaver compact``: read a trained network, make it smaller, measure it before and after, and write it."""

from dataclasses import replace
from typing import Any

from rich.console import Console

from shaver.commands.options import CompactOptions
from shaver.commands.outcome import COMPACTION, measure_network, show_and_write
from shaver.commands.subject import Subject, criterion_of, how_to_give_data, prepare
from shaver.measure.example import resize
from shaver.naming import check_count
from shaver.structure import CompactReport, compact_with_report, find_groups
from shaver.structure.scores import DAMAGE
from shaver.training import fit


def run_compact(options: CompactOptions, console: Console) -> CompactReport:
    """Make a network smaller as the options say, print the result, and write it if a folder is given."""
    subject = _prepare(options)
    assert subject.example is not None
    posterior = None if options.sparsity is None else subject.posterior(console)
    with console.status("Measuring the network as it is …"):
        rows = {"before": measure_network(subject.model, subject)}
    example = resize(subject.example, 2)  # with two samples, constants differ from values per sample
    with console.status("Finding coupled units …"):
        groups = find_groups(subject.model, example, residual=options.residual)
    with console.status("Choosing and removing units …") as status:
        calibration = subject.calibration() if options.repair else None
        choice: dict[str, Any] = {"groups": groups, "posterior": posterior}
        if options.sparsity is not None:  # else only dead units are removed
            names = ("sparsity", "target", "spread", "round_to", "min_units")
            choice |= {name: getattr(options, name) for name in names}
            choice |= {"criterion": subject.criterion, **subject.scoring()}
        report = compact_with_report(
            subject.model,
            example,
            **choice,
            calibration=calibration,
            passes=options.passes,
            progress=lambda done, total: status.update(f"Repairing … {done} of {total} steps"),
        )
        if calibration is not None:
            plain = compact_with_report(subject.model, example, **choice).model
            rows["unrepaired"] = measure_network(plain, subject)
    console.print(str(report), highlight=False, markup=False)
    rows["after"] = rows["removed"] = measure_network(report.model, subject)
    if options.finetune and subject.data is not None:
        with console.status(f"Fine-tuning for {options.finetune} epochs …"):
            fit(
                report.model,
                subject.data.train.origin,
                method="map",
                epochs=options.finetune,
                lr=options.lr,
                batch_size=options.batch_size,
                likelihood=subject.likelihood,
                seed=options.seed,
            )
        rows["after"] = measure_network(report.model, subject)
        if "accuracy" in rows["removed"]:
            accuracy = 100 * rows["removed"]["accuracy"]
            console.print(f"Before fine-tuning the accuracy was {accuracy:.2f} %.", highlight=False)
    chosen = report.choice
    content = {
        "criterion": None if options.sparsity is None else subject.criterion,
        "target": chosen.target,
        "spread": options.spread,
        "requested": chosen.requested,
        "achieved": chosen.achieved,
        "widths": {name: {"before": before, "after": after} for name, (before, after) in chosen.widths.items()},
        "finetune": options.finetune,
    }
    show_and_write(subject, console, report.model, rows, content, COMPACTION)
    return report


def _prepare(options: CompactOptions) -> Subject:
    """Check the options, then read the network and the data."""
    criterion_of(options)
    check_count("round_to", options.round_to)
    check_count("min_units", options.min_units)
    if options.data is None and not options.input_shape:
        raise ValueError(
            "compact follows an input through the network: give --input-shape, such as 1 28 28, "
            f"or {how_to_give_data()}."
        )
    if options.finetune < 0:
        raise ValueError(f"--finetune must be 0 or more epochs, not {options.finetune}.")
    if options.finetune and options.data is None:
        raise ValueError(f"--finetune needs data: {how_to_give_data()}.")
    subject = prepare(options)
    has_posterior = subject.trained.posterior is not None or options.prior_precision is not None
    if options.criterion is None and subject.data is not None and options.repair and not has_posterior:
        return replace(subject, criterion=DAMAGE)  # as shaver.compact does with calibration data
    return subject
