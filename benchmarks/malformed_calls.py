"""Malformed calls: every argument of every public function is replaced by values that it cannot have.

    python benchmarks/malformed_calls.py

A call ends as *taken* (the value is allowed there, such as None for an optional argument), *answered* (an error that
this package raises, in its own words) or *unclear* (an error of torch's or Python's). Unclear calls are listed.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.malformed import attempts


def main() -> None:
    """Run and print the counts."""
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    torch.set_num_threads(1)
    counts: Counter[str] = Counter()
    for call, result, words in attempts():
        counts[result] += 1
        if result == "unclear":
            print(f"{call}: {words}", flush=True)
    print(f"{counts.total()} calls: " + ", ".join(f"{counts[k]} {k}" for k in ("taken", "answered", "unclear")))
    sys.exit(counts["unclear"] > 10)


if __name__ == "__main__":
    main()
