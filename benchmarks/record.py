"""The highest compression of the LeNets on MNIST: one training from random weights to the last thousand of them.

SpaM learns δ, the weights and biases with the lowest OPD leave along a cubic schedule, and units of which nothing is
left are cut out of the network, so that training becomes faster while the network empties. ``shaver run
record-300-100`` and ``shaver run record-caffe`` are the same training by `shaver.fit`, at the full size throughout.

    python benchmarks/record.py --network caffe --compression 400 --seeds 3 --out record.csv
"""

import argparse
import csv
import math
import time
from collections.abc import Iterator
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shaver
import shaver.data
from shaver import zoo
from shaver.criteria.rules import with_biases
from shaver.measure import cost, quality
from shaver.pruning import Masks, cubic
from shaver.pruning.masks import Hold
from shaver.structure import find_groups, kept_units, remove_units

#: Name → network, learning rate and epochs.
NETWORKS = {
    "300-100": ({"name": "fcn", "hidden": [300, 100]}, 0.1, 30),
    "caffe": ({"name": "lenet_caffe"}, 0.05, 20),
    "lenet": ({"name": "lenet"}, 0.05, 20),
}
START, END, EVERY = 0.1, 0.7, 50


class Shaving:
    """A network in training that keeps fewer and fewer weights, and loses the units that have none."""

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, spam: shaver.SpaM, last: int) -> None:
        self.model, self.optimizer, self.spam, self.last = model, optimizer, spam, last
        self.first = sum(p.numel() for p in model.parameters())
        self.hold: Hold | None = None
        self.is_final = False

    def update(self, progress: float) -> None:
        """Keep the weights and biases with the highest OPD, as many as the schedule says."""
        share = cubic(min(1.0, max(0.0, (progress - START) / (END - START))))
        count = round(self.first - share * (self.first - self.last))
        scores = shaver.score(self.model, "opd", posterior=self.spam.posterior, rule=with_biases(self.model))
        if self.hold is not None:
            scores = {name: s.masked_fill(~self.hold.masks[name], -1.0) for name, s in scores.items()}
        flat = torch.cat([s.flatten() for s in scores.values()])
        if count >= len(flat):
            return
        least = flat.topk(count).values[-1]
        masks = Masks({name: s >= least for name, s in scores.items()})
        if self.hold is None:
            self.hold = masks.hold(self.model, self.optimizer)
        else:
            self.hold.update(masks)
        self.is_final = progress >= END

    def cut_out(self, example: Tensor) -> None:
        """Remove the units of which nothing is left; the network computes the same without them."""
        if self.hold is None:
            return
        groups = find_groups(self.model, example)
        kept = kept_units(groups, self.hold.masks)
        if any(not bool(keep.all()) for keep in kept.values()):
            remove_units(
                self.model, groups, kept, example, in_place=True,
                optimizer=self.optimizer, spam=self.spam, hold=self.hold,
            )  # fmt: skip


def trained(
    name: str, compression: float, seed: int, epochs: int | None, lr: float | None
) -> Iterator[dict[str, object]]:
    """Train one network; yields a row after each epoch, the last one with the network."""
    arguments, own_lr, own_epochs = NETWORKS[name]
    lr, epochs = lr or own_lr, epochs or own_epochs
    data = shaver.data.load("mnist")
    model = zoo.build(**arguments, seed=seed)
    first = sum(p.numel() for p in model.parameters())
    batches = data.train.batches(128, shuffle=True, seed=seed)
    total = epochs * len(batches)
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=0.9)
    spam = shaver.SpaM(model, len(data.train), total_steps=total, seed=seed, freeze=END)
    shaving = Shaving(model, optimizer, spam, math.floor(first / compression))
    example = data.test[:4][0]
    step, began = 0, time.process_time()
    for epoch in range(epochs):
        batches.set_epoch(epoch)
        summed = 0.0
        for x, y in batches:
            for group in optimizer.param_groups:
                group["lr"] = lr * 0.5 * (1 + math.cos(math.pi * step / total))
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            spam.step(optimizer)
            summed += float(loss.detach())
            step += 1
            is_due = step % EVERY == 0 or step >= END * total
            if START * total < step and is_due and spam.updates and not shaving.is_final:
                shaving.update(step / total)
        shaving.cut_out(example)
        weights = list(model.parameters())
        row: dict[str, object] = {
            "network": name, "method": "shaver", "seed": seed, "epochs": epochs, "epoch": epoch + 1,
            "loss": summed / len(batches), "nonzeros": sum(int((p != 0).sum()) for p in weights),
            "parameters": sum(p.numel() for p in weights), "all": first, "seconds": time.process_time() - began,
        }  # fmt: skip
        if (epoch + 1) % 5 == 0 or epoch + 1 == epochs:
            row["error"] = 100 * (1 - quality(model, data.test.batches(1000)).as_dict()["accuracy"])
        if epoch + 1 == epochs:
            row["bytes"] = cost(model, example[:1], latency=False).bytes_sparse
            row["model"], row["masks"] = model, shaving.hold.masks if shaving.hold is not None else None
        yield row
    spam.close()


def main() -> None:
    """Train the seeds one after the other and append their last rows to a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--network", choices=NETWORKS, default="300-100")
    parser.add_argument("--compression", type=float, default=100)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--epochs", type=int)
    parser.add_argument("--lr", type=float)
    parser.add_argument("--out", type=Path, default=Path("record.csv"))
    parser.add_argument("--networks", type=Path, help="folder for the final networks")
    given = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(given.first_seed, given.first_seed + given.seeds):
        for row in trained(given.network, given.compression, seed, given.epochs, given.lr):
            model, masks = row.pop("model", None), row.pop("masks", None)
            print({k: round(v, 4) if isinstance(v, float) else v for k, v in row.items()}, flush=True)
        if given.networks is not None:
            shaver.save(model, given.networks / f"{given.network}-{given.compression:g}-{seed}", masks)
        is_new = not given.out.is_file()
        with open(given.out, "a", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(row))
            if is_new:
                writer.writeheader()
            writer.writerow(row)


if __name__ == "__main__":
    main()
