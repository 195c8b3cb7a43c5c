"""Random networks against a reference, one sample at a time in double precision: the long run of the property test.

    python benchmarks/random_networks.py --networks 5000
    python benchmarks/random_networks.py --networks 5000 --record results.jsonl     # may be interrupted and continued
    python benchmarks/random_networks.py --first 1234 --networks 1                  # one again

Counts how many estimates, online measurements and measured trainings are equal to the reference (1e-8), refused in
words, wrong, or crashed, and lists what is wrong or crashed by its seed. Networks are dense, convolutional, attention,
mixtures of experts, with learned slopes, bilinear layers, parametrizations, zero weights, equal or zero samples and
batches of one; every 250th is compiled.
"""

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.curvature.random_networks import compare

RESULTS = ("equal", "refused", "wrong", "crashed")


def compared(seed: int, is_compiled: bool) -> dict[str, Any]:
    """Compare one network."""
    if is_compiled:
        torch._dynamo.reset()
    outcome = compare(seed, "aot_eager" if is_compiled else None)
    return {"seed": seed, "kind": outcome.kind, "results": outcome.results}


def main() -> None:
    """Run and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=500, help="how many")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--compile-every", type=int, default=250, help="how many networks for each compiled one")
    parser.add_argument(
        "--record", type=Path, help="a file of results, one line per network; those in it are not repeated"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    console, counts, began = Console(), Counter[tuple[str, str]](), time.process_time()
    lines = options.record.read_text().splitlines() if options.record and options.record.exists() else []
    known = {entry["seed"]: entry for entry in map(json.loads, lines)}
    for seed in track(range(options.first, options.first + options.networks), console=console):
        entry = known.get(seed) or compared(seed, is_compiled=seed % options.compile_every == options.compile_every - 1)
        if options.record and seed not in known:
            with options.record.open("a") as record:
                record.write(json.dumps(entry) + "\n")
        for what, result, words in entry["results"]:
            counts[what, result] += 1
            if result != "equal":
                console.print(f"seed {seed} ({entry['kind']}), {what}: {result}: {words[:300]}", markup=False)
    table = Table(
        "", *RESULTS, title=f"{options.networks} networks, {time.process_time() - began:.0f} s of processor time"
    )
    for what in dict.fromkeys(what for what, _ in counts):
        table.add_row(what, *(str(counts[what, result]) for result in RESULTS))
    console.print(table)
    sys.exit(any(counts[what, result] for what, _ in counts for result in ("wrong", "crashed")))


if __name__ == "__main__":
    main()
