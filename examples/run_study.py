"""Run a small version of one experiment of the paper: MAP and SpaM on breast cancer, with the results as a table."""

import argparse
from pathlib import Path

from rich.console import Console

from shaver.lab import get_recipe, load_runs, run_study
from shaver.lab.run.engines import LocalEngine

options = argparse.ArgumentParser(description=__doc__)
options.add_argument("--epochs", type=int, default=50)
options.add_argument("--seeds", type=int, default=2)
options.add_argument("--out", type=Path, default=Path("runs/fcn-cancer-short"))
given = options.parse_args()

if __name__ == "__main__":  # each cell runs in its own process
    recipe = get_recipe("fcn-cancer", "cpu").override(
        epochs=given.epochs, seeds=given.seeds, criteria=("opd", "magnitude"), sparsities=(0.8, 0.9, 0.95, 0.98)
    )
    print(recipe)
    outcome = run_study(recipe, given.out, engine=LocalEngine(), console=Console())
    for cell, error in outcome.failed.items():
        print(f"{cell} failed: {error}")

    frame = load_runs(outcome.folder)
    print(frame.pivot_table("accuracy", ["method", "criterion"], "sparsity").round(4).to_string())
