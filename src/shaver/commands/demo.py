"""``shaver demo``: two small networks, trained, pruned, compacted and measured; tables here and one page."""

import copy
import json
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from torch import nn

import shaver.data
from shaver.commands.options import DemoOptions
from shaver.commands.outcome import before_and_after
from shaver.commands.run import show_unlearned
from shaver.criteria import score
from shaver.files import load_trained, save
from shaver.lab.recipes.catalogue import get_recipe
from shaver.lab.recipes.recipe import Recipe
from shaver.lab.report.filters import filter_bank, layer_bars, precision_histograms
from shaver.lab.report.output import write_report
from shaver.lab.run.engines import LocalEngine
from shaver.lab.run.folder import CELLS, CONFIG, link, read_study
from shaver.lab.run.runner import run_study
from shaver.lab.run.store import MODEL, POSTERIOR
from shaver.measure import summary
from shaver.pruning import prune
from shaver.structure import compact_with_report

#: What is removed for the pictures: a share of the units, and of the weights.
UNITS, WEIGHTS = 0.7, 0.95


def run_demo(options: DemoOptions, console: Console) -> None:
    """Run the demo's two recipes, and show what came of them.

    The run folder gets ``report.html``, ``tables/``, ``figures/`` and ``pictures/``; ``results.csv`` and
    ``study.json`` as every study has them; the trained networks with their posteriors in ``models/``; a compact one in
    ``compact/``.

    Raises:
        ValueError: A number is too small.
        RuntimeError: Some cells failed; the message lists them with their errors.
    """
    if options.repeats < 1 or (options.epochs is not None and options.epochs < 1) or options.processes < 1:
        given = f"here repeats is {options.repeats}, epochs {options.epochs}, processes {options.processes}"
        raise ValueError(f"repeats, epochs and processes must be 1 or more; {given}.")
    out, units = options.out, options.out / "units"
    changed = {"first_seed": options.seed, "epochs": options.epochs}
    engine = LocalEngine(options.processes)
    try:
        _run(get_recipe("demo").override(seeds=options.repeats, **changed), out, out, engine, console)
        _run(get_recipe("demo-units").override(**changed), units, out, engine, console)
    finally:
        engine.close()
    _link_models(out)
    write_report([out, units], out, formats=("terminal", "markdown", "csv", "latex", "svg"), console=console)
    _show_compact(out, units, options.seed, console)
    write_report([out, units], out, formats=["html"], console=console)  # last: the page has the pictures
    page = escape(str(out / "report.html"))
    console.print(
        f"\nOpen [bold]{page}[/] in a browser. Beside it: results.csv, tables, figures, models.", soft_wrap=True
    )


def _run(recipe: Recipe, folder: Path, out: Path, engine: LocalEngine, console: Console) -> None:
    outcome = run_study(recipe, folder, engine=engine, store=out / "networks", console=console)
    show_unlearned(outcome, console)
    if outcome.failed:
        listed = "\n".join(f"{label}: {error}" for label, error in outcome.failed.items())
        raise RuntimeError(f"{len(outcome.failed)} cells failed (tracebacks are in {folder}/cells).\n{listed}")


def _link_models(out: Path) -> None:
    """Give the trained networks names that people can type: ``models/digits-spam-0.safetensors``."""
    (out / "models").mkdir(exist_ok=True)
    for key in read_study(out)["cells"]:
        cell = out / CELLS / key
        training = json.loads((cell / CONFIG).read_text(encoding="utf-8"))["training"]
        name = f"{training['data']['name']}-{training['labels']['method']}-{training['labels']['seed']}"
        link(cell / MODEL, out / "models" / f"{name}.safetensors")
        link(cell / POSTERIOR, out / "models" / f"{name}-posterior.safetensors")


def _show_compact(out: Path, units: Path, seed: int, console: Console) -> None:
    """Remove most units of the network with the unit prior, and draw what is left."""
    (key,) = read_study(units)["cells"]
    trained = load_trained(units / CELLS / key / MODEL)
    model, posterior = trained.model, trained.posterior
    assert posterior is not None
    test = list(shaver.data.load("digits", seed=seed).test.batches(256))
    example = test[0][0][:2]
    with console.status("Removing units, and drawing what is left …"):
        report = compact_with_report(model, example, posterior=posterior, sparsity=UNITS)
        before, after = (summary(network, test, example) for network in (model, report.model))
        masked = copy.deepcopy(model)
        prune(masked, score(masked, "opd", posterior=posterior), WEIGHTS)
        states: dict[str, nn.Module] = {
            "dense": model,
            f"{100 * WEIGHTS:.0f} % of weights removed": masked,
            f"{100 * UNITS:.0f} % of units removed": report.model,
        }
        pictures = out / "pictures"
        pictures.mkdir(exist_ok=True)
        filter_bank(states, pictures / "filters")
        layer_bars(states, pictures / "layers")
        precision_histograms({"unit prior": posterior.delta()}, model, pictures / "precision")
        save(report.model, out / "compact")
    console.print(f"\nDigits: {100 * UNITS:.0f} % of the units removed by OPD, not fine-tuned", style="bold")
    console.print(str(report.choice), highlight=False, markup=False)
    console.print(before_and_after(before, after, "digits, test split", smaller=True))
    console.print(f"The small network is in [bold]{out / 'compact'}[/], its filters in {pictures / 'filters.svg'}.")
