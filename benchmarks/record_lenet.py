"""The paper's LeNet on MNIST without 99 % of its weights: pruned after training, repaired, and trained further.

    python benchmarks/record_lenet.py                                       # three seeds
    python benchmarks/record_lenet.py --seeds 100 --held-out --no-test      # to choose settings

Adds its rows to docs/results/record.csv. With --held-out it trains on 50,000 images and judges the others too.

1. SpaM for 30 epochs at temperature 3: the data count a third, so that fewer weights stay relevant.
2. OPD (optimal posterior damage) removes 99 % of the weights in one step ("afterwards"; all biases stay), and
   `shaver.repair` lets the others make up for it ("repaired"; 2,048 images without labels).
3. OPD removes 99 % of the weights and biases together, and what is left trains for another 15 epochs with the masks
   held, from the full learning rate down to zero ("spam").

The recipe `record-lenet` is parts 1 and 3 in one call of `shaver.fit`. Part 1 is kept in --runs.
"""

import argparse
import copy
import time
from pathlib import Path
from typing import Any

import torch
from record import FIELDS, bytes_on_disk
from record_compacted import Told, error_of, nonzero
from torch import nn

import shaver
import shaver.data
from shaver import zoo
from shaver.criteria.prunable_weights import with_biases
from shaver.data import InMemory
from shaver.evidence import Posterior
from shaver.io import load_state, save_state, write_csv
from shaver.lab.run.results import read_rows

TRAINING: dict[str, Any] = {"lr": 0.05, "batch_size": 128, "progress": False}
EPOCHS, TEMPERATURE = (30, 15), 3.0
#: Of the Gaussian prior in part 3.
PRECISION = 2.0
#: Slightly more than 99 %, so that the rounded count is enough.
SPARSITY = 1 - 1 / 100.1
#: Images for repair.
CALIBRATION = 2048


def trained(train: InMemory, seed: int, place: Path) -> tuple[nn.Module, Posterior, float]:
    """Part 1, read from its files if they are there: the network, its posterior, and the seconds of training."""
    model, file = zoo.build("lenet", seed=seed), place / "dense.safetensors"
    if not file.exists():
        began = time.process_time()
        shaver.fit(
            model, train, epochs=EPOCHS[0], seed=seed, spam={"temperature": TEMPERATURE, "debias": False},
            folder=place / "fit", logger=Told("training"), **TRAINING,
        )  # fmt: skip
        save_state(file, {"weights": model.state_dict(), "seconds": time.process_time() - began})
    saved = load_state(file)
    model.load_state_dict(saved["weights"])
    return model.eval(), Posterior.load(place / "fit" / "posterior.safetensors"), saved["seconds"]


def afterwards(model: nn.Module, posterior: Posterior) -> nn.Module:
    """Part 2 without repair."""
    pruned = copy.deepcopy(model)
    shaver.prune(pruned, shaver.score(model, "opd", posterior=posterior), 0.99)
    return pruned


def repaired(model: nn.Module, pruned: nn.Module, train: InMemory) -> nn.Module:
    """Part 2 with repair, under the same masks."""
    done, images = copy.deepcopy(pruned), train[:CALIBRATION][0]
    shaver.repair(done, images.split(128), reference=model, masks=nonzero(pruned))
    return done


def trained_further(model: nn.Module, posterior: Posterior, train: InMemory, seed: int) -> nn.Module:
    """Part 3."""
    pruned = copy.deepcopy(model)
    shaver.prune(pruned, shaver.score(model, "opd", posterior=posterior, rule=with_biases(model)), SPARSITY)
    shaver.fit(
        pruned, train, method="map", masks=nonzero(pruned), epochs=EPOCHS[1], seed=seed,
        weight_decay=PRECISION / len(train), logger=Told("masks held"), **TRAINING,
    )  # fmt: skip
    return pruned.eval()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--held-out", action="store_true", help="train on 50,000 images and judge the other 10,000")
    parser.add_argument("--no-test", action="store_true", help="judge no test images and write no rows")
    parser.add_argument("--runs", type=Path, default=Path("runs/record-lenet"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = shaver.data.load("mnist", valid_fraction=1 / 6 if given.held_out else 0.0, seed=0)

    def tell(method: str, network: nn.Module, epochs: int, seconds: float) -> None:
        kept = nonzero(network).kept
        if given.held_out:
            print(f"{method}: {kept} weights, held-out images: error {error_of(network, data.valid)} %", flush=True)
        if given.no_test:
            return
        row = {
            "task": "lenet-mnist", "method": method, "dropout": 0, "epochs": epochs, "seed": seed,
            "parameters": sum(p.numel() for p in network.parameters()), "nonzeros": kept,
            "biases": sum(int((p != 0).sum()) for p in network.parameters() if p.ndim == 1),
            "error": error_of(network, data.test), "file": bytes_on_disk(network), "seconds": round(seconds),
        }  # fmt: skip
        row["compression"] = round(row["parameters"] / kept, 1)
        print(row, flush=True)
        rows = [*read_rows(given.out / "record.csv"), row]
        write_csv(given.out / "record.csv", [{name: r[name] for name in FIELDS} for r in rows])

    for seed in given.seeds:
        place = given.runs / (f"held-out-{seed}" if given.held_out else str(seed))
        model, posterior, seconds = trained(data.train, seed, place)
        print(f"seed {seed}, dense: error {error_of(model, data.valid if given.no_test else data.test)} %", flush=True)
        pruned = afterwards(model, posterior)
        tell("afterwards", pruned, EPOCHS[0], seconds)
        began = time.process_time()
        tell("repaired", repaired(model, pruned, data.train), EPOCHS[0], seconds + time.process_time() - began)
        began = time.process_time()
        further = trained_further(model, posterior, data.train, seed)
        tell("spam", further, sum(EPOCHS), seconds + time.process_time() - began)


if __name__ == "__main__":
    main()
