r"""Pruning trained networks without training again: plain masks, norm statistics alone, peers, and repair.

    python benchmarks/repair.py                          # all parts: docs/results/repair.csv and its table
    python benchmarks/repair.py --parts resnet20 --resnet20 resnet20.safetensors
    python benchmarks/repair.py --parts lenet fashion --seeds 1

Every method of a row starts from the same trained network. Calibration images come from the training set, without their
labels; accuracy is that of all 10,000 test images. Trained networks are kept in --runs. One process, one torch thread;
``seconds`` is processor time. Rows that are in the CSV file already are not measured again.
"""

import argparse
import copy
import csv
import resource
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from repair_networks import resnet20, trained, trained_reader
from repair_peers import check, prune_layerwise
from torch import Tensor, nn

import shaver
from shaver.repairing import joint_fit, output_damage

Row = dict[str, Any]
FIELDS = ("network", "seed", "removed", "share", "method", "accuracy", "images", "seconds", "megabytes")
#: What CHITA's paper reports for this ResNet-20.
PUBLISHED = {"MP": (88.44, 78.79, 54.01, 11.79), "WoodFisher": (90.23, 81.05, 62.63, 11.49),
             "CBS": (90.58, 81.84, 51.28, 13.68), "CHITA++": (91.04, 90.38, 88.72, 79.32)}  # fmt: skip

#: Images that a fit of all layers together sees: 40 passes over 4,000 images, 10 over 16,000.
SEEN = 160_000
#: Calibration images of a part, if not 4,000.
IMAGES = {"units": 16_000, "flops": 60_000}
#: How a small network is fine-tuned with labels. Chosen on 10,000 training images that were left out.
TUNING: dict[str, Any] = {"epochs": 5, "optimizer": "adam", "lr": 0.012, "batch_size": 64}
#: How one of its widths is trained from new weights: as the dense network, for as many epochs in all.
SCRATCH: dict[str, Any] = {"epochs": 17, "lr": 0.05}

#: Which trained network each part prunes.
NETWORKS = {
    "lenet": "LeNet/MNIST MAP",
    "fashion": "LeNet/Fashion MAP",
    "spam": "LeNet/MNIST SpaM",
    "units": "LeNet/MNIST MAP",
    "batchnorm": "ResNet/MNIST MAP",
    "flops": "LeNet/Fashion MAP",
}

Method = Callable[[nn.Module], nn.Module]


class Case:
    """One network with its calibration images and its test images."""

    def __init__(
        self,
        name: str,
        seed: int,
        model: nn.Module,
        images: Tensor,
        test: list[tuple[Tensor, Tensor]],
        *,
        batch: int = 128,
        seen: int = SEEN,
    ) -> None:
        self.name, self.seed, self.model, self.test = name, seed, model, test
        self.calibration = list(images.split(batch))
        self.images = len(images)
        self.passes = seen // len(images)
        self._repaired: tuple[Method, nn.Module, Any] | None = None
        self._small: tuple[float, nn.Module] | None = None

    def measure(self, removed: str, share: float, method: str, run: Method) -> Row:
        """One row of the table."""
        began = time.process_time()
        model = run(copy.deepcopy(self.model))
        seconds = time.process_time() - began
        accuracy = shaver.measure.quality(model, self.test).accuracy
        memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
        values = (
            self.name,
            self.seed,
            removed,
            share,
            method,
            round(100 * accuracy, 2),
            self.images,
            round(seconds, 1),
        )
        return dict(zip(FIELDS, (*values, memory), strict=True))

    def plain(self, sparsity: float, criterion: str, posterior: Any, *, measured_again: bool) -> Method:
        """Masks alone, or with the norm statistics measured again."""

        def run(model: nn.Module) -> nn.Module:
            shaver.prune(model, shaver.score(model, criterion, posterior=posterior), sparsity)
            if measured_again:
                shaver.recalibrate(model, self.calibration)
            return model

        return run

    def repaired(self, sparsity: float, criterion: str, posterior: Any) -> Method:
        """Pruned in rounds and repaired."""

        def run(model: nn.Module) -> nn.Module:
            scores = shaver.score(model, criterion, posterior=posterior)
            pruned = shaver.prune(model, scores, sparsity, calibration=self.calibration)
            self._repaired = (run, model, pruned.masks)
            return model

        return run

    def by_damage(self, sparsity: float) -> Method:
        """The same, ranked by the damage that remains after the repair."""

        def run(model: nn.Module) -> nn.Module:
            scores = output_damage(model, self.calibration)
            pruned = shaver.prune(model, scores, sparsity, calibration=self.calibration)
            self._repaired = (run, model, pruned.masks)
            return model

        return run

    def by_factors(self, sparsity: float, labels: Tensor) -> Method:
        """Magnitude, then one repair from the Kronecker factors of a posterior and no further pass over data."""

        def run(model: nn.Module) -> nn.Module:
            labelled = list(zip(self.calibration, labels.split(len(self.calibration[0])), strict=True))
            curvature = shaver.curvature.estimate(model, labelled, structure="kron", source="mc")
            posterior = shaver.evidence.fit_prior(model, curvature)
            dense = copy.deepcopy(model)
            shaver.prune(model, shaver.score(model, "magnitude"), sparsity)
            shaver.repair(model, reference=dense, posterior=posterior, damping=0.01)
            return model

        return run

    def together(self, repaired: Method) -> Method:
        """What ``prune(…, passes=…)`` does after the last round, on the network of the row before."""

        def run(dense: nn.Module) -> nn.Module:
            if self._repaired is None or self._repaired[0] is not repaired:
                repaired(copy.deepcopy(dense))
            assert self._repaired is not None
            _, model, masks = self._repaired
            joint_fit(model, self.calibration, reference=dense, masks=masks, passes=self.passes)
            return model

        return run

    def peer(self, sparsity: float, method: str, *, shared: bool) -> Method:
        """SparseGPT or Wanda, with the norm statistics measured again.

        Args:
            sparsity: Of every layer, or of all layers together.
            method: ``"sparsegpt"`` or ``"wanda"``.
            shared: Each layer's sparsity is that of a ranking of all weights by output damage.
        """

        def run(model: nn.Module) -> nn.Module:
            shares: Any = sparsity
            if shared:
                ranked = shaver.prune(copy.deepcopy(model), output_damage(model, self.calibration), sparsity)
                shares = {layer.name: layer.sparsity for layer in ranked.layers}
            prune_layerwise(model, self.calibration, shares, method)
            shaver.recalibrate(model, self.calibration)
            return model

        return run

    def units(self, share: float, criterion: str, *, calibrated: bool, passes: int = 0) -> Method:
        """A smaller network, with or without repair."""

        def run(model: nn.Module) -> nn.Module:
            extra: dict[str, Any] = {"calibration": self.calibration, "passes": passes} if calibrated else {}
            example = self.calibration[0][:2]
            small: nn.Module = shaver.compact(model, example, criterion=criterion, sparsity=share, **extra)
            return small

        return run

    def smaller(self, flops: float) -> Method:
        """A network with this share of FLOPs removed, each layer at its own width, repaired."""

        def run(model: nn.Module) -> nn.Module:
            options: dict[str, Any] = {"target": "flops", "spread": "global", "passes": self.passes}
            example = self.calibration[0][:2]
            small = shaver.compact(model, example, sparsity=flops, calibration=self.calibration, **options)
            self._small = (flops, small)
            return small

        return run

    def trained_on(self, flops: float, train: Any, *, anew: bool) -> Method:
        """The repaired small network fine-tuned with the dense one as its teacher, or its widths from new weights."""

        def run(dense: nn.Module) -> nn.Module:
            if self._small is None or self._small[0] != flops:
                self.smaller(flops)(dense)
            assert self._small is not None
            small = copy.deepcopy(self._small[1])
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(self.seed)
                for module in small.modules():
                    if anew and isinstance(module, nn.Linear | nn.Conv2d):
                        module.reset_parameters()
            options = SCRATCH if anew else TUNING | {"teacher": dense}
            shaver.fit(small, train, method="map", seed=self.seed, **options)
            return small.eval()

        return run

    def torch_pruning(self, share: float) -> Method:
        """torch-pruning's smaller network: the same share of every layer, by the norm of each group's weights."""

        def run(model: nn.Module) -> nn.Module:
            import torch_pruning as tp

            layers = [module for module in model.modules() if isinstance(module, nn.Linear | nn.Conv2d)]
            pruner = tp.pruner.BasePruner(
                model,
                self.calibration[0][:2],
                importance=tp.importance.GroupMagnitudeImportance(p=2),
                pruning_ratio=share,
                ignored_layers=layers[-1:],
            )
            pruner.step()
            return model

        return run


def weights(
    case: Case, shares: tuple[float, ...], criterion: str = "magnitude", posterior: Any = None
) -> Iterator[Any]:
    """The cells of unstructured rows: label, share, method, function."""
    norms = any(isinstance(module, nn.BatchNorm2d) for module in case.model.modules())
    for share in shares:
        yield "weights", share, "masks", case.plain(share, criterion, posterior, measured_again=False)
        if norms:
            yield "weights", share, "masks, norms", case.plain(share, criterion, posterior, measured_again=True)
        yield "weights", share, "Wanda", case.peer(share, "wanda", shared=False)
        yield "weights", share, "SparseGPT", case.peer(share, "sparsegpt", shared=False)
        yield "weights", share, "SparseGPT, shares by damage", case.peer(share, "sparsegpt", shared=True)
        ways = [("repair", case.repaired(share, criterion, posterior))]
        ways += [("repair, output damage", case.by_damage(share))]
        for method, way in ways:
            yield "weights", share, method, way
            yield "weights", share, f"{method}, together", case.together(way)


def units(case: Case, shares: tuple[float, ...]) -> Iterator[Any]:
    """The cells of structured rows."""
    for share in shares:
        yield "units", share, "masks", case.units(share, "magnitude", calibrated=False)
        yield "units", share, "torch-pruning", case.torch_pruning(share)
        yield "units", share, "repair", case.units(share, "magnitude", calibrated=True)
        yield "units", share, "repair, damage", case.units(share, "damage", calibrated=True)
        yield (
            "units",
            share,
            "repair, damage, together",
            case.units(share, "damage", calibrated=True, passes=case.passes),
        )


def language(case: Case, shares: tuple[float, ...]) -> Iterator[Any]:
    """The cells of a language model: each share is one round that starts from the network of the share before."""
    masks, present = shaver.pruning.Masks({}), copy.deepcopy(case.model)
    rounds = shaver.pruning.rounds.Rounds(present, case.calibration)
    scores = output_damage(case.model, case.calibration)

    def step(share: float) -> Method:
        def run(_: nn.Module) -> nn.Module:
            nonlocal masks
            masks = rounds.step(scores, share, masks)
            return present

        return run

    def plain(share: float) -> Method:
        def run(model: nn.Module) -> nn.Module:
            shaver.prune(model, scores, share)
            return model

        return run

    for share in shares:
        yield "weights", share, "masks", case.plain(share, "magnitude", None, measured_again=False)
        yield "weights", share, "masks, output damage", plain(share)
        yield "weights", share, "repair, output damage", step(share)


def tuned(case: Case, ratios: tuple[float, ...], train: Any) -> Iterator[Any]:
    """Small networks by their FLOPs: repaired, fine-tuned with labels, and the same widths from new weights."""
    for ratio in ratios:
        share = round(1 - 1 / ratio, 4)
        yield "FLOPs", share, "repair, damage, together", case.smaller(share)
        yield "FLOPs", share, "fine-tuned, 5 epochs", case.trained_on(share, train, anew=False)
        yield "FLOPs", share, "from scratch, 17 epochs", case.trained_on(share, train, anew=True)


def online(case: Case, train: Any) -> Iterator[Any]:
    """The cells of a short training that prunes as it goes, with and without repair after each update of the masks."""

    def way(end: float, calibration: Any) -> Method:
        def run(model: nn.Module) -> nn.Module:
            schedule = shaver.pruning.Online(0.97, every=30, start=0.2, end=end, calibration=calibration)
            shaver.fit(model, train, method="map", epochs=10, batch_size=64, seed=case.seed, online=schedule)
            return model.eval()

        return run

    for end in (0.6, 1.0):
        yield "weights", 0.97, f"masks final at {end:.0%} of training", way(end, None)
        yield "weights", 0.97, f"masks final at {end:.0%} of training, repaired", way(end, case.calibration)


def cases(part: str, asked: argparse.Namespace) -> Iterator[tuple[Case, Iterator[Any]]]:
    """The networks of a part, each with what is measured on it."""
    if part == "resnet20":
        splits = shaver.data.load("cifar10")
        scaled = [(x.float() / 255 - 0.5) / 0.5 for x in (splits.train.inputs[_some(1024, 50_000)], splits.test.inputs)]
        test = list(zip(scaled[1].split(500), splits.test.targets.split(500), strict=True))
        case = Case("ResNet-20/CIFAR-10", 0, resnet20(asked.resnet20), scaled[0], test)
        yield case, weights(case, (0.5, 0.7, 0.8, 0.9))
        return
    if part == "minilm":
        found = trained_reader(asked.runs)
        reviews, test = found["splits"].train[torch.arange(160)][0], list(found["splits"].test.batches(50))
        case = Case("MiniLM/IMDB MAP", 0, found["model"], reviews, test, batch=32)
        yield case, language(case, (0.6, 0.8))
        return
    for seed in range(asked.seeds):
        if part == "online":
            digits = shaver.data.load("digits")
            test = list(digits.test.batches(500))
            case = Case("CNN/digits MAP", seed, shaver.zoo.build("digits_cnn", seed=seed), digits.train[:][0], test)
            yield case, online(case, digits.train)
            continue
        name = NETWORKS[part]
        found = trained(name, seed, asked.runs)
        images = found["splits"].train[_some(IMAGES.get(part, 4000), 60_000)][0]
        test, seen = list(found["splits"].test.batches(500)), 10 * len(images) if part == "flops" else SEEN
        case = Case(name, seed, found["model"], images, test, seen=seen)
        if part == "units":
            yield case, units(case, (0.6, 0.8))
        elif part == "flops":
            yield case, tuned(case, (5.6, 11.0), found["splits"].train)
        elif part == "spam":
            yield case, weights(case, (0.98, 0.99), "opd", found["posterior"])
        else:
            shares = {"lenet": (0.95, 0.97, 0.98), "fashion": (0.9, 0.95), "batchnorm": (0.8, 0.9)}[part]
            yield case, weights(case, shares)
            if part == "lenet":
                labels = found["splits"].train[_some(4000, 60_000)][1]
                yield case, (("weights", s, "repair, Kronecker factors", case.by_factors(s, labels)) for s in shares)


def _some(count: int, total: int) -> Tensor:
    return torch.randperm(total, generator=torch.Generator().manual_seed(0))[:count]


def table(rows: list[Row]) -> str:
    """A Markdown table: a row for each network and share, a column for each method."""
    methods = list(dict.fromkeys(row["method"] for row in rows))
    lines = ["| network | removed | " + " | ".join(methods) + " |", "|---|---|" + "---|" * len(methods)]
    keys = [(row["network"], row["removed"], float(row["share"])) for row in rows]
    for key in dict.fromkeys(keys):
        mine = [row for row, own in zip(rows, keys, strict=True) if own == key]
        cells = []
        for method in methods:
            values = [float(row["accuracy"]) for row in mine if row["method"] == method]
            cells.append(f"{sum(values) / len(values):.2f}" if values else "–")
        lines.append(f"| {key[0]} | {100 * key[2]:g} % of {key[1]} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parts = ("resnet20", "lenet", "fashion", "spam", "batchnorm", "units", "flops", "minilm", "online")
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--resnet20", type=Path, default=Path("resnet20.safetensors"), help="the weights' file")
    parser.add_argument("--runs", type=Path, default=Path("runs/repair"))
    parser.add_argument("--csv", type=Path, default=Path("docs/results/repair.csv"))
    parser.add_argument("--methods", nargs="+", help="only these")
    parser.add_argument("--shares", nargs="+", type=float, help="only these shares, and the dense network")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    check()
    rows: list[Row] = []
    if asked.csv.exists():
        with open(asked.csv, newline="") as file:
            rows = list(csv.DictReader(file))
    done = {tuple(str(row[key]) for key in FIELDS[:5]) for row in rows}
    for part in asked.parts:
        for case, cells in cases(part, asked):
            for removed, share, method, run in [("weights", 0.0, "dense", lambda model: model), *cells]:
                if asked.methods and method not in asked.methods:
                    continue
                if asked.shares and share not in (0.0, *asked.shares):
                    continue
                if (case.name, str(case.seed), removed, str(share), method) in done:
                    continue
                rows.append(case.measure(removed, share, method, run))
                done.add(tuple(str(rows[-1][key]) for key in FIELDS[:5]))
                print(*rows[-1].values(), flush=True)
                with open(asked.csv, "w", newline="") as file:
                    writer = csv.DictWriter(file, FIELDS)
                    writer.writeheader()
                    writer.writerows(rows)
    print(table(rows))
    print("published at 50 / 70 / 80 / 90 %:", PUBLISHED)


if __name__ == "__main__":
    main()
