"""The demo's trainings with many seeds, as several processors compute them: does one of them fail to learn?

    python benchmarks/demo_seeds.py                                     # 20 seeds × MAP and SpaM × three arithmetics
    python benchmarks/demo_seeds.py --seeds 5 --arithmetic native       # a first impression
    python benchmarks/demo_seeds.py --tasks demo-digits --set epochs=30,lr=0.05    # other settings

MAP is ordinary training with weight decay. Prints the test accuracy in % before pruning and with 95 and 98 % of the
weights removed by OPD: the lowest, the mean, and how many trainings ended no better than guessing. Exit code 1 if any
did.
"""

import argparse
import ast
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ARITHMETICS = {
    "native": {"OMP_NUM_THREADS": "1"},
    "sse41": {"OMP_NUM_THREADS": "1", "ATEN_CPU_CAPABILITY": "default", "ONEDNN_MAX_CPU_ISA": "SSE41"},
    "two-threads": {
        "OMP_NUM_THREADS": "2",
        "OMP_WAIT_POLICY": "passive",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
}
SPARSITIES = (0.95, 0.98)


def measure(settings: dict[str, Any], tasks: list[str] | None, file: Path) -> None:
    """Train and prune every cell in this process; rows go to a CSV file."""
    import pandas as pd

    from shaver.lab.recipes.catalogue import get_recipe
    from shaver.lab.recipes.grid import cells_of
    from shaver.lab.run.networks import load_data, obtain
    from shaver.lab.run.stage_rows import evaluate, is_better_than_guessing

    recipe = get_recipe("demo").override(
        tasks=tasks or ["demo-digits", "demo-cancer"], criteria=["opd"], sparsities=SPARSITIES, **settings
    )
    rows = []
    with tempfile.TemporaryDirectory() as store:
        for cell in cells_of(recipe):
            data = load_data(cell.training)
            trained, _ = obtain(cell.training, data, Path(store), code="", any_code=False, report=_silent)
            measured = [row for part in evaluate(cell, trained, data, report=_silent) for row in part]
            dead = not is_better_than_guessing(measured[0]["accuracy"], data.test.targets)
            accuracy = {f"{100 * row['sparsity']:g} %": 100 * row["accuracy"] for row in measured}
            rows.append({"task": cell.task, "method": cell.training.labels["method"], "dead": dead} | accuracy)
            pd.DataFrame(rows).to_csv(file, index=False)


def _silent(note: str, done: int, of: int) -> None: ...


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=20)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--arithmetic", nargs="+", choices=ARITHMETICS, default=list(ARITHMETICS))
    parser.add_argument("--tasks", nargs="+", help="demo-cancer or demo-digits")
    parser.add_argument("--set", default="", help="settings of the recipe, such as epochs=30,lr=0.05")
    parser.add_argument("--file", type=Path, help=argparse.SUPPRESS)  # what a child process writes
    options = parser.parse_args()
    if options.file is not None:
        pairs = (pair.split("=") for pair in filter(None, options.set.split(",")))
        settings = {name: ast.literal_eval(value) for name, value in pairs}
        settings |= {"seeds": options.seeds, "first_seed": options.first_seed}
        measure(settings, options.tasks, options.file)
        return

    import pandas as pd

    died = 0
    with tempfile.TemporaryDirectory() as folder:
        for arithmetic in options.arithmetic:
            file = Path(folder) / f"{arithmetic}.csv"
            command = [sys.executable, __file__, *sys.argv[1:], "--file", str(file)]
            subprocess.run(command, env=os.environ | ARITHMETICS[arithmetic], check=True)
            found = pd.read_csv(file)
            died += int(found["dead"].sum())
            columns = [name for name in found if name.endswith("%")]
            table = found.groupby(["task", "method"])[columns].agg(["min", "mean", "std"]).round(2)
            table["dead", ""] = found.groupby(["task", "method"])["dead"].sum()
            print(f"{arithmetic}, {options.seeds} seeds {options.set}\n{table.to_string()}\n", flush=True)
    sys.exit(died > 0)


if __name__ == "__main__":
    main()
