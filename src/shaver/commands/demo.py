"""``shaver demo``: train, prune, compact and measure two small networks; print tables and write one page."""

import copy
from dataclasses import replace
from pathlib import Path

from rich.console import Console
from rich.markup import escape
from torch import nn

import shaver.data
from shaver.commands.options import DemoOptions
from shaver.commands.outcome import before_and_after
from shaver.commands.run import show_problems
from shaver.criteria import score
from shaver.files import load_trained, save
from shaver.io import read_json
from shaver.lab.recipes.catalogue import get_recipe
from shaver.lab.report.canvas import drawing, save_figure
from shaver.lab.report.figures import overview
from shaver.lab.report.filters import filter_bank, layer_bars, precision_histograms
from shaver.lab.report.output import read_runs, write_report
from shaver.lab.run.engines import LocalEngine
from shaver.lab.run.networks import MODEL, POSTERIOR
from shaver.lab.run.results import CELLS, CONFIG, link, read_study
from shaver.lab.run.runner import run_study
from shaver.measure import summary
from shaver.naming import check_count
from shaver.pruning import prune
from shaver.structure import compact_with_report

#: The shares of units and of weights to remove for the compact network and the pictures.
UNITS, WEIGHTS = 0.7, 0.95


def run_demo(options: DemoOptions, console: Console) -> None:
    """Run the demo's recipe and show the results.

    The run folder gets ``report.html``, ``tables/``, ``figures/accuracy.svg`` and ``pictures/``; ``results.csv`` and
    ``study.json``, like every study; the trained networks and their posteriors in ``models/``; and a compact network in
    ``compact/``.
    """
    check_count("--processes", options.processes)
    check_count("--repeats", options.repeats)
    out = options.out
    recipe = get_recipe("demo").override(first_seed=options.seed, epochs=options.epochs)
    recipe = replace(recipe, seeds=options.repeats)  # not for the task that sets its own number of seeds
    engine = LocalEngine(options.processes)
    try:
        outcome = run_study(recipe, out, engine=engine, store=out / "networks", console=console)
    finally:
        engine.close()
    show_problems(outcome, console)
    _link_models(out)
    write_report([out], out, formats=("terminal", "markdown", "csv", "latex"), console=console)
    with drawing() as plt:
        overview(plt, read_runs([out]).experiments)
        save_figure(plt, out / "figures" / "accuracy", ["svg"])
    _show_compact(out, options.seed, console)
    write_report([out], out, formats=["html"], console=console)  # last: the page has the pictures
    page = escape(str(out / "report.html"))
    console.print(
        f"\nOpen [bold]{page}[/] in a browser. Beside it: results.csv, tables, models, and a figure; "
        f"`shaver report {escape(str(out))}` draws all figures.",
        soft_wrap=True,
    )


def _link_models(out: Path) -> None:
    """Give the trained networks names that people can type: ``models/digits-spam-0.safetensors``."""
    (out / "models").mkdir(exist_ok=True)
    for key in read_study(out)["cells"]:
        cell = out / CELLS / key
        config = read_json(cell / CONFIG)
        labels = config["training"]["labels"]
        name = f"{config['task'].removeprefix('demo-')}-{labels['method']}-{labels['seed']}"
        link(cell / MODEL, out / "models" / f"{name}.safetensors")
        link(cell / POSTERIOR, out / "models" / f"{name}-posterior.safetensors")


def _show_compact(out: Path, seed: int, console: Console) -> None:
    """Remove most units of the network with the unit prior, repair the others, and draw what is left."""
    trained = load_trained(out / "models" / f"units-spam-{seed}.safetensors")
    model, posterior = trained.model, trained.posterior
    assert posterior is not None
    data = shaver.data.load("digits", seed=seed)
    test, train = list(data.test.batches(256)), data.train.batches(256)
    example = test[0][0][:2]
    with console.status("Removing units, and drawing the result …"):
        removed = compact_with_report(model, example, posterior=posterior, sparsity=UNITS)
        report = compact_with_report(model, example, posterior=posterior, sparsity=UNITS, calibration=train)
        networks = (model, removed.model, report.model)
        before, unrepaired, after = (summary(network, test, example) for network in networks)
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
    console.print(
        f"\nDigits: {100 * UNITS:.0f} % of the units removed by OPD, the rest repaired with unlabelled images, no "
        "fine-tuning",
        style="bold",
        soft_wrap=True,
    )
    console.print(str(report.choice), highlight=False, markup=False)
    console.print(before_and_after(before, after, "digits, test split", smaller=True, unrepaired=unrepaired))
    console.print(f"The small network is in [bold]{out / 'compact'}[/], its filters in {pictures / 'filters.svg'}.")
