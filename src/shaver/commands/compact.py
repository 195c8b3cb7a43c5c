"""``shaver compact``: a trained network from a file, made smaller, measured before and after, and written."""

from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from shaver import criteria
from shaver.commands.compact_options import CompactOptions, ExportOptions
from shaver.commands.outcome import check_free, complete_folder, finite, measure_network, size_of
from shaver.commands.prune import REPORT as PRUNING_REPORT
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
from shaver.files import load_trained, save
from shaver.io import read_json, write_json
from shaver.lab.report.comparison import before_and_after
from shaver.lab.run.sweep import Row
from shaver.measure.example import resize
from shaver.pruning.ranking import check_sparsity
from shaver.structure import ChoiceOptions, CompactReport, compact_with_report, find_groups
from shaver.structure.export import export_onnx
from shaver.training import fit

REPORT = "compact.json"


def run_compact(options: CompactOptions, console: Console) -> CompactReport:
    """Make a network smaller as the options say, show what came of it, and write it if a folder is given.

    Raises:
        ValueError: An option is out of range, or something that it needs is missing; nothing is written then.
        OSError: A file cannot be read or written.
    """
    setting = _prepare(options)
    assert setting.example is not None
    posterior = None
    if options.sparsity is not None and "posterior" in criteria.needs(setting.criterion):
        with console.status("Looking for the posterior …"):
            posterior, is_learned = posterior_of(setting, f"--criterion {setting.criterion}")
        console.print(origin_of(posterior, is_learned), highlight=False)
    with console.status("Measuring the network as it is …"):
        before = measure_network(setting.model, setting)
    example = resize(setting.example, 2)  # two samples tell a constant from a value
    with console.status("Finding what belongs together …"):
        groups = find_groups(setting.model, example, residual=options.residual)
    with console.status("Choosing and removing units …"):
        report = compact_with_report(
            setting.model, example, groups=groups, posterior=posterior, **_choice(options, setting)
        )
    console.print(str(report), highlight=False, markup=False)
    rows = [before, measure_network(report.model, setting)]
    if options.finetune:
        with console.status(f"Fine-tuning for {options.finetune} epochs …"):
            _finetune(report.model, setting, options)
        rows.append(measure_network(report.model, setting))
    title = None if setting.data is None else setting.data.title
    console.print(before_and_after(rows[0], rows[-1], title, smaller=True))
    if options.finetune and "accuracy" in rows[1]:
        console.print(f"Before fine-tuning the accuracy was {100 * rows[1]['accuracy']:.2f} %.", highlight=False)
    if options.out is not None:
        size = _write(options, setting, report, rows)
        console.print(
            f"{size:,} bytes written to {options.out}; shaver.load reads them.", highlight=False, markup=False
        )
    return report


def run_export(options: ExportOptions, console: Console) -> Path:
    """Write a saved network as an ONNX file.

    Raises:
        ValueError: No format is given, or an input's shape is not known.
        ImportError: The packages for it are missing.
    """
    if options.onnx is None:
        raise ValueError("say what to write: --onnx, or --onnx PATH.")
    if len(options.onnx) > 1:
        raise ValueError(f"--onnx takes one path, not {len(options.onnx)}.")
    shape = options.input_shape or _stored_shape(options.folder)
    if not shape:
        raise ValueError(
            f"{options.folder} does not say what an input looks like: give --input-shape, such as 1 28 28; "
            "for inputs that are no images or vectors use shaver.structure.export_onnx in Python."
        )
    model = load_trained(options.folder, options.factory).model
    beside = options.folder / "network.onnx" if options.folder.is_dir() else options.folder.with_suffix(".onnx")
    path = options.onnx[0] if options.onnx else beside
    with console.status("Exporting …"):
        export_onnx(model, torch.zeros(2, *shape), path)
    console.print(f"{path.stat().st_size:,} bytes written to {path}.", highlight=False, markup=False)
    return path


def _prepare(options: CompactOptions) -> Setting:
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


def _choice(options: CompactOptions, setting: Setting) -> dict[str, Any]:
    """How units are chosen; without a sparsity, those that do nothing go."""
    if options.sparsity is None:
        return {}
    return {
        "criterion": setting.criterion,
        "sparsity": options.sparsity,
        "target": options.target,
        "spread": options.spread,
        "round_to": options.round_to,
        "min_units": options.min_units,
        **scoring(setting),
    }


def _finetune(model: nn.Module, setting: Setting, options: CompactOptions) -> None:
    assert setting.data is not None
    fit(
        model,
        setting.data.parts.train,
        method="map",
        epochs=options.finetune,
        lr=options.lr,
        batch_size=options.batch_size,
        likelihood=setting.likelihood,
        seed=options.seed,
    )


def _write(options: CompactOptions, setting: Setting, report: CompactReport, rows: list[Row]) -> int:
    """Write network and report, and return the network's bytes; a new folder appears complete or not at all."""
    assert options.out is not None
    assert setting.example is not None
    chosen = report.choice
    content = {
        "checkpoint": str(options.checkpoint),
        "criterion": None if options.sparsity is None else setting.criterion,
        "target": chosen.target,
        "spread": options.spread,
        "requested": chosen.requested,
        "achieved": chosen.achieved,
        "widths": {name: {"before": before, "after": after} for name, (before, after) in chosen.widths.items()},
        "input_shape": shape_of(setting.example),
        "finetune": options.finetune,
        "data": None if setting.data is None else setting.data.title,
        "before": rows[0],
        "removed": rows[1],
        "after": rows[-1],
    }
    with complete_folder(options.out) as folder:
        (folder / REPORT).unlink(missing_ok=True)  # rather none than that of the network before
        size = size_of(save(report.model, folder))
        write_json(folder / REPORT, finite(content))
    return size


def _stored_shape(folder: Path) -> tuple[int, ...]:
    for report in (folder / REPORT, folder / PRUNING_REPORT):
        if report.is_file():
            stored = read_json(report)
            return tuple(stored.get("input_shape") or ()) if isinstance(stored, dict) else ()
    return ()
