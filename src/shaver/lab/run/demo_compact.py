"""The end of the demo: a network of digits with most of its units removed, what that costs, and a look inside."""

import copy
from pathlib import Path

import torch
from rich.console import Console

import shaver.data
import shaver.zoo
from shaver.criteria import score
from shaver.files import save
from shaver.lab.report.comparison import before_and_after
from shaver.lab.report.filters import filter_bank, layer_bars, precision_histograms
from shaver.lab.run.sweep import measure
from shaver.pruning import prune
from shaver.structure import compact_with_report
from shaver.training import fit

EPOCHS = 40
SPARSITY, WEIGHTS = 0.7, 0.95


def show_compact(out: Path, *, seed: int, epochs: int | None, console: Console) -> None:
    """Train the digits network with the unit prior, remove units by OPD, and show what is left.

    Args:
        out: The run folder: the small network goes into ``compact/``, pictures into ``pictures/``.
        seed: Of the data, the weights and training.
        epochs: Instead of 40.
        console: Where the tables appear.
    """
    data = shaver.data.load("digits", seed=seed)
    model = shaver.zoo.build("digits_cnn", seed=seed)
    with console.status("Training one more, with a precision for each unit, and making it smaller …"):
        history = fit(
            model, data.train, epochs=epochs or EPOCHS, lr=0.1, batch_size=64, seed=seed, spam={"prior": "unit"}
        )
        assert history.posterior is not None
        test = list(data.test.batches(256))
        example = test[0][0][:2]
        report = compact_with_report(model, example, posterior=history.posterior, sparsity=SPARSITY)
        before, after = (measure(network, test, example, latency=True) for network in (model, report.model))
        masked = copy.deepcopy(model)
        prune(masked, score(masked, "opd", posterior=history.posterior), WEIGHTS)
        states: dict[str, torch.nn.Module] = {
            "dense": model,
            f"{100 * WEIGHTS:.0f} % of weights removed": masked,
            f"{100 * SPARSITY:.0f} % of units removed": report.model,
        }
        pictures = out / "pictures"
        pictures.mkdir(parents=True, exist_ok=True)
        filter_bank(states, pictures / "filters")
        layer_bars(states, pictures / "layers")
        precision_histograms({"unit prior": history.posterior.delta()}, model, pictures / "precision")
        save(report.model, out / "compact")
    console.print(
        "\nDigits, small CNN with the unit prior, and without most of its units, not fine-tuned", style="bold"
    )
    console.print(str(report.choice), highlight=False, markup=False)
    console.print(before_and_after(before, after, "digits, test split", smaller=True))
    console.print(f"The small network is in [bold]{out / 'compact'}[/], its filters in {pictures / 'filters.svg'}.")
