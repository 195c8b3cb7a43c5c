"""``shaver export``: write a saved network as a file for other programs."""

from pathlib import Path

import torch
from rich.console import Console

from shaver.commands.options import ExportOptions
from shaver.commands.outcome import COMPACTION, ONNX, PRUNING
from shaver.files import load_trained
from shaver.io import read_json
from shaver.structure.export import export_onnx


def run_export(options: ExportOptions, console: Console) -> Path:
    """Write a saved network as an ONNX file."""
    if options.onnx is None:
        raise ValueError("say what to write: --onnx, or --onnx PATH.")
    if len(options.onnx) > 1:
        raise ValueError(f"--onnx takes one path, not {len(options.onnx)}.")
    model = load_trained(options.folder, options.factory).model
    shape = options.input_shape or _stored_shape(options.folder)
    if not shape:
        raise ValueError(
            f"{options.folder} does not say what an input looks like: give --input-shape, such as 1 28 28; "
            "for inputs that are neither images nor vectors use shaver.structure.export_onnx in Python."
        )
    beside = options.folder / ONNX if options.folder.is_dir() else options.folder.with_suffix(".onnx")
    path = options.onnx[0] if options.onnx else beside
    with console.status("Exporting …"):
        export_onnx(model, torch.zeros(2, *shape), path)
    console.print(f"{path.stat().st_size:,} bytes written to {path}.", highlight=False, markup=False)
    return path


def _stored_shape(folder: Path) -> tuple[int, ...]:
    for report in (folder / COMPACTION, folder / PRUNING):
        if report.is_file():
            stored = read_json(report)
            return tuple(stored.get("input_shape") or ()) if isinstance(stored, dict) else ()
    return ()
