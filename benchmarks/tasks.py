r"""Dense accuracy and accuracy after pruning on eleven small tasks: MAP and SpaM with several settings.

    python benchmarks/tasks.py --split valid --tasks digits cancer --set "" --set temperature=0.5
    python benchmarks/tasks.py --seeds 2                    # all tasks, test split
    python benchmarks/tasks.py --report                     # the table of the rows that the file has

MAP is ordinary training with the weight decay that was best for it on the validation split, and SpaM starts from the
same one; weight_decay=0 leaves both at their defaults. Networks are pruned by OPD (optimal posterior damage) without
fine-tuning, once by masks alone (BatchNorm statistics are measured again) and once with repair from unlabelled training
samples. The repair ends with passes in which all layers are fitted together: on the LeNets ten passes over these
samples, on CIFAR-10 ten passes over the training images and their mirror images; 98 % is left out there. Every training
adds one row to the CSV file, and rows that the file has are not repeated.
The data come from the folder in SHAVER_DATA.
"""

import argparse
import copy
import csv
import math
import re
import statistics
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from repair_networks import ResNet
from spam import parse_settings
from torch import Tensor, nn

import shaver

#: Column → sparsity, and whether the network is repaired.
COLUMNS = {f"{100 * s:g} %{', repaired' * r}": (s, bool(r)) for s in (0.9, 0.95, 0.98) for r in (0, 1)}
#: Points below MAP's dense accuracy that are allowed, by column.
BOUNDS = {"dense": 0.2, "90 %, repaired": 0.5, "95 %, repaired": 1.0}
#: Unlabelled training samples that the repair reads, and how many at once.
IMAGES, REVIEWS = (2_000, 250), (256, 64)
#: Reviews are cut to this many words; other words than the most frequent ones are all the same.
WORDS, VOCABULARY = 64, 4000
#: Schedules beside those of :func:`shaver.fit`: share of the training so far → share of the learning rate.
SCHEDULES = {"linear": lambda share: 1.0 - share, "halved": lambda share: 1.0 if share < 0.5 else 0.5}


@dataclass(frozen=True)
class Task:
    """A network, its data and its training, the same for every method."""

    network: str
    data: str
    epochs: int
    seeds: int = 2
    images: int | None = None  # training samples; None for all
    batch_size: int = 128
    training: dict[str, Any] = field(default_factory=dict)
    decay: float | None = None  # MAP's best weight decay on the validation split, for both methods; None: the default
    arguments: dict[str, Any] = field(default_factory=dict)
    calibration: tuple[int, int] = IMAGES
    passes: int = 0  # of the repair, over the calibration data, in which all layers are fitted together
    more_passes: int = 0  # then over all images and their mirror images
    highest: float = 0.98  # sparsity


_ADAM = {"optimizer": "adam", "lr": 3e-3}
_SCRATCH = {"optimizer": "adamw", "lr": 1e-3, "clip": 1.0}
_CIFAR: dict[str, Any] = {
    "epochs": 10, "images": 10_000, "decay": 0.02, "calibration": (2_000, 100), "more_passes": 10, "highest": 0.95,
}  # fmt: skip
TASKS = {
    "digits": Task("digits_cnn", "digits", 40, 12, None, 64, decay=0.01),
    "cancer": Task("fcn", "cancer", 100, 20, None, 64, {}, 0.05, {"inputs": 30, "hidden": (100, 100), "classes": 2}),
    "FCN/MNIST": Task("fcn", "mnist", 30, 3, 60_000),
    "LeNet/MNIST": Task("lenet", "mnist", 20, 3, 60_000, calibration=(2_000, 100), passes=10),
    "LeNet/Fashion": Task("lenet", "fashion", 20, 3, 60_000, decay=1e-3, calibration=(2_000, 100), passes=10),
    "ResNet-20/CIFAR-10": Task("resnet20", "cifar10", seeds=3, **_CIFAR),
    "ResNet-18/CIFAR-10": Task("resnet18", "cifar10", seeds=3, arguments={"planes": 16}, **_CIFAR),
    "WRN-16-2/CIFAR-10": Task("wrn16", "cifar10", seeds=1, arguments={"widen": 2}, **_CIFAR),
    "ViT/MNIST": Task("vit", "mnist", 10, 3, 60_000, 128, _ADAM),  # 0.003 is better than 0.001 for MAP too
    "GPT/IMDB": Task("gpt", "imdb", 4, 4, 3_000, 32, _SCRATCH, calibration=REVIEWS),
    "BERT/IMDB": Task("bert", "imdb", 4, 3, 3_000, 32, _SCRATCH, calibration=REVIEWS),
}


def build(task: Task, seed: int) -> nn.Module:
    """The network with random weights."""
    torch.manual_seed(seed)
    if task.network == "resnet20":
        return ResNet()
    if task.network in ("gpt", "bert"):
        import transformers

        from shaver.zoo.reader import Reader

        sizes = {
            "vocab_size": VOCABULARY,
            "num_labels": 2,
            "pad_token_id": 0,
            "bos_token_id": None,
            "eos_token_id": None,
        }
        if task.network == "gpt":
            config = transformers.GPT2Config(n_embd=64, n_layer=2, n_head=2, n_positions=WORDS, **sizes)
            return Reader(transformers.GPT2ForSequenceClassification(config))
        config = transformers.BertConfig(
            hidden_size=64, num_hidden_layers=2, num_attention_heads=2, intermediate_size=256,
            max_position_embeddings=WORDS, **sizes,
        )  # fmt: skip
        return Reader(transformers.BertForSequenceClassification(config))
    return shaver.zoo.build(task.network, seed=seed, **task.arguments)


def numbered(texts: list[str], words: dict[str, int]) -> Tensor:
    """The words of each text as numbers; 0 is padding, 1 is any other word."""
    rows = [[words.get(w, 1) for w in re.findall("[a-z']+", text.lower())[:WORDS]] for text in texts]
    return torch.tensor([row + [0] * (WORDS - len(row)) for row in rows])


def load(task: Task, seed: int, split: str) -> tuple[shaver.data.InMemory, shaver.data.InMemory]:
    """Training data and the data that accuracy is measured on; for validation these are other training data."""
    draw = torch.Generator().manual_seed(seed)
    if task.data == "imdb":
        texts: Any = shaver.data.load("imdb")
        order = torch.randperm(len(texts.train), generator=draw)
        chosen = [order[: task.images], order[-10_000:]]
        if split == "test":
            chosen[1] = torch.randperm(25_000, generator=draw)[:10_000]
        parts = [texts.train, texts.train if split == "valid" else texts.test]
        lists = [[of.texts[i].replace("<br />", " ") for i in index] for of, index in zip(parts, chosen, strict=True)]
        counts = Counter(w for text in lists[0] for w in re.findall("[a-z']+", text.lower()))
        words = {word: i + 2 for i, (word, _) in enumerate(counts.most_common(VOCABULARY - 2))}
        train, judged = (
            shaver.data.InMemory(numbered(of, words), part.targets[index], classes=2)
            for of, part, index in zip(lists, parts, chosen, strict=True)
        )
        return train, judged
    is_small = task.images is None  # its own split for each seed
    splits = shaver.data.load(
        task.data, seed=seed if is_small else 0, valid_fraction=(0.2 if is_small else 0.1) if split == "valid" else 0.0
    )
    train, judged = splits.train, splits.valid if split == "valid" else splits.test
    if task.images is not None:
        train = shaver.data.InMemory(*train[torch.randperm(len(train), generator=draw)[: task.images]])
    if task.data == "cifar10":  # half the resolution
        train, judged = (shaver.data.InMemory(F.avg_pool2d(d[:][0], 2), d[:][1]) for d in (train, judged))
    return train, judged


def run(name: str, label: str, seed: int, split: str) -> dict[str, Any]:
    """Train one network and measure it."""
    task = TASKS[name]
    train, judged = load(task, seed, split)
    model = build(task, seed)
    method = "map" if label.startswith("MAP") else "spam"
    own = parse_settings(label.partition(" ")[2])
    training = (
        {"weight_decay": task.decay}
        | task.training
        | {key: own.pop(key) for key in ("optimizer", "lr", "schedule", "weight_decay") if key in own}
    )
    training["weight_decay"] = training["weight_decay"] or None
    if training.get("schedule") in SCHEDULES:
        training["schedule"] = SCHEDULES[training["schedule"]]
    began = time.process_time()
    history = shaver.fit(
        model, train, method=method, epochs=task.epochs, batch_size=task.batch_size, seed=seed,
        **training, **(own if method == "map" else {"spam": own}),
    )  # fmt: skip
    seconds = time.process_time() - began
    model.eval()
    posterior = history.posterior
    if posterior is None:
        found = shaver.curvature.estimate(model, train.batches(256), source="mc")
        posterior = shaver.evidence.fit_prior(model, found)
    scores = shaver.score(model, "opd", posterior=posterior)
    most, size = task.calibration
    inputs = [train[i : i + size][0] for i in range(0, len(train), size)]
    calibration = inputs[: math.ceil(most / size)]
    quality = shaver.measure.quality(model, judged.batches(500))
    accuracies, nll = {"dense": round(100 * quality.accuracy, 2)}, round(quality.nll, 4)
    for column, (sparsity, repaired) in COLUMNS.items():
        if sparsity > task.highest:
            accuracies[column] = math.nan
            continue
        pruned = copy.deepcopy(model)
        if repaired:
            found = shaver.prune(pruned, scores, sparsity, calibration=calibration, passes=task.passes)
            if task.more_passes:
                images = inputs + [batch.flip(-1) for batch in inputs]
                shaver.repairing.joint_fit(pruned, images, reference=model, passes=task.more_passes, masks=found.masks)
        else:
            shaver.prune(pruned, scores, sparsity)
            shaver.recalibrate(pruned, calibration)
        accuracies[column] = round(100 * shaver.measure.quality(pruned, judged.batches(500)).accuracy, 2)
    return {
        "task": name, "split": split, "samples": len(train), "epochs": task.epochs, "training": label, "seed": seed,
        **accuracies, "nll": nll, "seconds": round(seconds, 1),
    }  # fmt: skip


def report(rows: list[dict[str, Any]]) -> str:
    """A Markdown table per split: mean ± standard error, and which of the three bounds are kept.

    The bounds are points below the best MAP's dense accuracy, or one standard error of its mean if that is more.
    """
    lines = []
    for split in dict.fromkeys(row["split"] for row in rows):
        columns = ["dense", *COLUMNS]
        heads = ["task", "training", "seeds", "difference from MAP", *columns, "NLL", "bounds kept"]
        lines += [f"\n{split} split\n", f"| {' | '.join(heads)} |", "|---|---|" + "--:|" * (len(heads) - 3) + "---|"]
        for name in TASKS:
            by: dict[str, list[dict[str, Any]]] = {}
            for row in sorted(rows, key=lambda row: (not row["training"].startswith("MAP"), row["training"])):
                if (row["split"], row["task"]) == (split, name):
                    by.setdefault(row["training"], []).append(row)
            plain = [of for label, of in by.items() if label.startswith("MAP")]
            best = max(plain, key=lambda of: mean_of(of, "dense")[0], default=[])
            usual, error = mean_of(best, "dense")
            dense = {row["seed"]: float(row["dense"]) for row in best}
            for label, of in by.items():
                cells, difference, kept = [shown(*mean_of(of, column)) for column in columns], "–", "–"
                if best and not label.startswith("MAP"):
                    pairs = [float(row["dense"]) - dense[row["seed"]] for row in of if row["seed"] in dense]
                    difference = shown(*mean_and_error(pairs), sign="+")
                    kept = ", ".join(
                        column.removesuffix(", repaired")
                        for column, bound in BOUNDS.items()
                        if usual - mean_of(of, column)[0] <= max(bound, 0.0 if math.isnan(error) else error) + 1e-9
                    )
                nll = statistics.fmean(float(row["nll"]) for row in of)
                lines.append(
                    f"| {' | '.join([name, label, str(len(of)), difference, *cells, f'{nll:.3f}', kept or 'none'])} |"
                )
    return "\n".join(lines) + "\n"


def shown(mean: float, error: float, sign: str = "") -> str:
    """A mean with its standard error, if there is one."""
    if math.isnan(mean):
        return "–"
    text = f"{mean:{sign}.2f}".replace("-", "−")
    return text if math.isnan(error) else f"{text} ± {error:.2f}"


def mean_of(rows: list[dict[str, Any]], column: str) -> tuple[float, float]:
    """Mean of a column, and its standard error."""
    return mean_and_error([float(row[column]) for row in rows])


def mean_and_error(values: list[float]) -> tuple[float, float]:
    """Mean and standard error; not a number where there are too few values."""
    mean = statistics.fmean(values) if values else math.nan
    known = len(values) > 1 and not math.isnan(mean)
    return mean, statistics.stdev(values) / len(values) ** 0.5 if known else math.nan


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tasks", nargs="+", choices=list(TASKS), default=list(TASKS))
    parser.add_argument("--split", choices=("test", "valid"), default="test")
    parser.add_argument("--set", action="append", help="settings of SpaM and of the training: a=1,b=2; may be repeated")
    parser.add_argument("--map", action="append", help="the same for MAP: lr=0.001, weight_decay=0.005, …")
    parser.add_argument("--seeds", type=int, nargs="+", help="the seeds; each task has its own number if left out")
    parser.add_argument("--no-map", action="store_true", help="train SpaM only")
    parser.add_argument("--out", type=Path, default=Path("docs/results/tasks.csv"))
    parser.add_argument("--report", action="store_true", help="only print the table")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = list(csv.DictReader(asked.out.open())) if asked.out.exists() else []
    known = {(row["task"], row["training"], int(row["seed"]), row["split"]) for row in rows}
    labels = [] if asked.no_map else [f"MAP {text}".strip() for text in asked.map or [""]]
    labels += [f"SpaM {text}".strip() for text in asked.set or [""]]
    wanted = [
        (name, label, seed, asked.split)
        for name in asked.tasks
        for seed in asked.seeds or range(TASKS[name].seeds)
        for label in labels
    ]
    for cell in [] if asked.report else wanted:
        if cell in known:
            continue
        row = run(*cell)
        print(row, flush=True)
        is_new = not asked.out.exists()
        with asked.out.open("a", newline="") as file:
            writer = csv.DictWriter(file, row, lineterminator="\n")
            if is_new:
                writer.writeheader()
            writer.writerow(row)
        rows.append({key: str(value) for key, value in row.items()})
    print(report(rows))


if __name__ == "__main__":
    main()
