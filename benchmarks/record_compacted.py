"""LeNet-5-Caffe on MNIST with at most one of 280 weights and biases: pruned while it trains, then trained small.

    python benchmarks/record_compacted.py                                  # three seeds
    python benchmarks/record_compacted.py --method map --seeds 0           # gradual magnitude pruning, the same way
    python benchmarks/record_compacted.py --seeds 100 --held-out --no-test # to choose settings

Adds its rows to docs/results/record.csv. With --held-out it trains on 50,000 images and judges the others too.

1. SpaM from random weights at a constant learning rate. The weights and biases with the lowest OPD (optimal posterior
   damage) are removed along a cubic schedule until the last step.
2. `shaver.compact` removes the units that have no weights left, so that an epoch takes a third of the time.
3. The remaining weights train under a plain Gaussian prior with the masks held, and the learning rate falls to zero.

The recipe `record-caffe` is the same training without part 2: slower, but one call of `shaver.fit`.
Part 1 is kept in --runs: an interrupted training goes on, and part 3 can be repeated with other settings.
"""

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from record import FIELDS, bytes_on_disk
from torch import nn

import shaver
import shaver.data
from shaver import zoo
from shaver.data import InMemory
from shaver.io import load_state, save_state, write_csv
from shaver.lab.run.results import read_rows
from shaver.pruning import Masks, Online

TRAINING: dict[str, Any] = {"lr": 0.05, "batch_size": 128, "progress": False}
#: Of part 1 and of part 3.
EPOCHS = (10, 20)
#: Of the Gaussian prior before δ is learned, and in part 3.
PRECISION = 20.0


def nonzero(model: nn.Module) -> Masks:
    """The weights that are left."""
    return Masks({name: p.detach() != 0 for name, p in model.named_parameters()})


def prune_while_training(given: argparse.Namespace, train: InMemory, seed: int, place: Path) -> nn.Module:
    """Part 1; read from its file if it is there."""
    model, file = zoo.build("lenet_caffe", seed=seed, dropout=given.dropout), place / "pruned.safetensors"
    if not file.exists():
        began = time.process_time()
        prior: dict[str, Any] = {"weight_decay": PRECISION / len(train)}
        if given.method == "spam":
            prior = {"spam": {"burn_in": 0.05, "freeze": 1.0, "initial_precision": PRECISION, "temperature": 1.0}}
        shaver.fit(
            model, train, method=given.method, epochs=EPOCHS[0], seed=seed, schedule="constant", folder=place / "fit",
            online=Online(1 - 1 / given.times, start=0.05, end=1.0, biases=True), logger=Told("pruning"),
            **prior, **TRAINING,
        )  # fmt: skip
        save_state(file, {"weights": model.state_dict(), "seconds": time.process_time() - began})
    model.load_state_dict(load_state(file)["weights"])
    return model


def cool_down(model: nn.Module, train: InMemory, seed: int) -> nn.Module:
    """Parts 2 and 3."""
    small = shaver.compact(model, train[:2][0], masks=nonzero(model))
    shaver.fit(
        small, train, method="map", masks=nonzero(small), epochs=EPOCHS[1], seed=seed,
        weight_decay=PRECISION / len(train), logger=Told("masks held"), **TRAINING,
    )  # fmt: skip
    return small.eval()


def error_of(model: nn.Module, data: InMemory) -> float:
    """The share of wrong answers, in %."""
    return round(100 * (1 - float(shaver.measure.quality(model, data.batches(1000)).accuracy)), 2)


class Told:
    """Prints a line per epoch."""

    def __init__(self, part: str) -> None:
        self._part = part

    def log(self, row: dict[str, Any], step: int) -> None:
        """One line."""
        pruned = f", sparsity {row['sparsity']:.5f}" if "sparsity" in row else ""
        print(f"{self._part}, epoch {step}: loss {row['loss']:.4f}{pruned}", flush=True)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--method", choices=["spam", "map"], default="spam", help="map is gradual magnitude pruning")
    parser.add_argument("--dropout", type=float, default=0.0, help="share of the pixels that each step drops")
    parser.add_argument(
        "--times",
        type=float,
        default=281,
        help="all weights ÷ kept ones; the default leaves room for rounding above 280",
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--held-out", action="store_true", help="train on 50,000 images and judge the other 10,000")
    parser.add_argument("--no-test", action="store_true", help="judge no test images and write no rows")
    parser.add_argument("--runs", type=Path, default=Path("runs/record-compacted"))
    parser.add_argument("--out", type=Path, default=Path("docs/results"))
    given = parser.parse_args()
    torch.set_num_threads(1)
    data = shaver.data.load("mnist", valid_fraction=1 / 6 if given.held_out else 0.0, seed=0)
    for seed in given.seeds:
        began = time.process_time()
        kind = f"{given.method}-{given.times:g}-{given.dropout:g}"
        place = given.runs / kind / (f"held-out-{seed}" if given.held_out else str(seed))
        was_pruned = (place / "pruned.safetensors").exists()
        model = prune_while_training(given, data.train, seed, place)
        small = cool_down(model, data.train, seed)
        left = nonzero(small)
        print(f"seed {seed}: {left.kept} weights and biases", flush=True)
        if given.held_out:
            print(f"held-out images: error {error_of(small, data.valid)} %", flush=True)
        if given.no_test:
            continue
        error = error_of(small, data.test)
        print(f"test images: error {error} %", flush=True)
        total = sum(p.numel() for p in model.parameters())
        earlier = load_state(place / "pruned.safetensors")["seconds"] if was_pruned else 0.0
        row = {
            "task": "lenet-caffe", "method": given.method, "dropout": f"{given.dropout:g}", "epochs": sum(EPOCHS),
            "seed": seed, "parameters": total, "nonzeros": left.kept,
            "biases": sum(int((p != 0).sum()) for p in small.parameters() if p.ndim == 1),
            "compression": round(total / left.kept, 1), "error": error, "file": bytes_on_disk(small),
            "seconds": round(earlier + time.process_time() - began),
        }  # fmt: skip
        rows = [*read_rows(given.out / "record.csv"), row]
        write_csv(given.out / "record.csv", [{name: r[name] for name in FIELDS} for r in rows])


if __name__ == "__main__":
    main()
