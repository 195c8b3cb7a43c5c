"""``shaver compact``: a trained network from a file, made smaller, measured before and after, and written."""

from typing import Any

from rich.console import Console
from torch import nn

from shaver import criteria
from shaver.commands.options import CompactOptions
from shaver.commands.outcome import COMPACTION, before_and_after, check_free, measure_network, quality_of, write_network
from shaver.commands.subject import (
    Subject,
    calibration_of,
    how_to_give_data,
    import_user_code,
    origin_of,
    posterior_of,
    prepare,
    scoring,
    shape_of,
)
from shaver.lab.run.folder import Row
from shaver.measure.example import resize
from shaver.pruning.ranking import check_sparsity
from shaver.structure import ChoiceOptions, CompactReport, compact_with_report, find_groups
from shaver.training import fit


def run_compact(options: CompactOptions, console: Console) -> CompactReport:
    """Make a network smaller as the options say, show what came of it, and write it if a folder is given.

    Raises:
        ValueError: An option is out of range, or something that it needs is missing; nothing is written then.
        OSError: A file cannot be read or written.
    """
    subject = _prepare(options)
    assert subject.example is not None
    posterior = None
    if options.sparsity is not None and "posterior" in criteria.needs(subject.criterion):
        with console.status("Reading or estimating the posterior …"):
            posterior, is_learned = posterior_of(subject, f"--criterion {subject.criterion}")
        console.print(origin_of(posterior, is_learned), highlight=False)
    with console.status("Measuring the network as it is …"):
        before = measure_network(subject.model, subject)
    example = resize(subject.example, 2)  # two samples tell a constant from a value
    with console.status("Finding what belongs together …"):
        groups = find_groups(subject.model, example, residual=options.residual)
    with console.status("Choosing and removing units …"):
        calibration, unrepaired = calibration_of(subject), None
        choice = _choice(options, subject) | {"groups": groups, "posterior": posterior}
        report = compact_with_report(subject.model, example, **choice, calibration=calibration)
        if calibration is not None:
            unrepaired = quality_of(compact_with_report(subject.model, example, **choice).model, subject)
    console.print(str(report), highlight=False, markup=False)
    rows = [before, measure_network(report.model, subject)]
    if options.finetune:
        with console.status(f"Fine-tuning for {options.finetune} epochs …"):
            _finetune(report.model, subject, options)
        rows.append(measure_network(report.model, subject))
    title = None if subject.data is None else subject.data.title
    console.print(before_and_after(rows[0], rows[-1], title, smaller=True, unrepaired=unrepaired))
    if options.finetune and "accuracy" in rows[1]:
        console.print(f"Before fine-tuning the accuracy was {100 * rows[1]['accuracy']:.2f} %.", highlight=False)
    if options.out is not None:
        size = _write(options, subject, report, rows)
        console.print(
            f"{size:,} bytes written to {options.out}; shaver.load reads them.", highlight=False, markup=False
        )
    return report


def _prepare(options: CompactOptions) -> Subject:
    """Check what is asked for, then read the network and the data."""
    import_user_code(options)
    criterion = criteria.get(options.criterion or "opd").name
    if options.sparsity is not None:
        check_sparsity(options.sparsity)
    ChoiceOptions(
        options.target, options.spread, "mean", options.round_to, options.min_units
    )  # its checks, before any work
    if options.data is None and not options.input_shape:
        raise ValueError(
            "compact looks at how an input goes through the network: give --input-shape, such as 1 28 28, "
            f"or {how_to_give_data()}."
        )
    if options.finetune < 0:
        raise ValueError(f"--finetune must be 0 or more epochs, not {options.finetune}.")
    if options.finetune and options.data is None:
        raise ValueError(f"--finetune needs data: {how_to_give_data()}.")
    if options.out is not None:
        check_free(options.out)
    return prepare(options, criterion)


def _choice(options: CompactOptions, subject: Subject) -> dict[str, Any]:
    """How units are chosen; without a sparsity, those that do nothing go."""
    if options.sparsity is None:
        return {}
    return {
        "criterion": subject.criterion,
        "sparsity": options.sparsity,
        "target": options.target,
        "spread": options.spread,
        "round_to": options.round_to,
        "min_units": options.min_units,
        **scoring(subject),
    }


def _finetune(model: nn.Module, subject: Subject, options: CompactOptions) -> None:
    assert subject.data is not None
    fit(
        model,
        subject.data.parts.train,
        method="map",
        epochs=options.finetune,
        lr=options.lr,
        batch_size=options.batch_size,
        likelihood=subject.likelihood,
        seed=options.seed,
    )


def _write(options: CompactOptions, subject: Subject, report: CompactReport, rows: list[Row]) -> int:
    """Write network and report, and return the bytes of the network."""
    assert options.out is not None
    assert subject.example is not None
    chosen = report.choice
    content = {
        "checkpoint": str(options.checkpoint),
        "criterion": None if options.sparsity is None else subject.criterion,
        "target": chosen.target,
        "spread": options.spread,
        "requested": chosen.requested,
        "achieved": chosen.achieved,
        "widths": {name: {"before": before, "after": after} for name, (before, after) in chosen.widths.items()},
        "input_shape": shape_of(subject.example),
        "finetune": options.finetune,
        "data": None if subject.data is None else subject.data.title,
        "before": rows[0],
        "removed": rows[1],
        "after": rows[-1],
    }
    return write_network(options.out, report.model, content, COMPACTION)
