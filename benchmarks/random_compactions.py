"""Random networks, compacted and compared with their masked selves on inputs that the library has not seen.

    python benchmarks/random_compactions.py --networks 1000

Each draw ends as *equal*, *refused* (an error of the library's own, in words), *wrong* (other outputs) or *crashed*
(an error of torch or Python). The last two should not occur. A draw is repeated with ``--first SEED --networks 1``.
"""

import argparse
import sys
from collections import Counter
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.structure.random_networks import compare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=1000, help="number of draws")
    parser.add_argument("--first", type=int, default=0, help="seed of the first draw")
    options = parser.parse_args()
    kinds: Counter[tuple[str, str]] = Counter()
    refusals: Counter[str] = Counter()
    for seed in range(options.first, options.first + options.networks):
        outcome = compare(seed)
        kinds[outcome.family, outcome.kind] += 1
        if outcome.kind in ("wrong", "crashed"):
            print(f"seed {seed} ({outcome.family}): {outcome.kind}: {outcome.detail[:300]}", flush=True)
        elif outcome.kind == "refused":
            refusals[outcome.detail.split(": ", 1)[0]] += 1
    columns = ("equal", "refused", "wrong", "crashed")
    print(f"{'family':<12}" + "".join(f"{column:>9}" for column in columns))
    for family in sorted({family for family, _ in kinds}):
        print(f"{family:<12}" + "".join(f"{kinds[family, column]:>9}" for column in columns))
    totals = [sum(count for (_, kind), count in kinds.items() if kind == column) for column in columns]
    print(f"{'all':<12}" + "".join(f"{total:>9}" for total in totals))
    print("refused by:", ", ".join(f"{place} {count}" for place, count in refusals.most_common()))


if __name__ == "__main__":
    main()
