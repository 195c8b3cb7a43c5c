r"""SpaM and MAP on five small experiments: accuracy over sparsity without fine-tuning, and training time.

    python benchmarks/spam.py                               # test split, three seeds (cancer: five)
    python benchmarks/spam.py --split valid --name defaults \
        --set shrink=0.5 --set freeze=0.5,shrink=0.5        # to choose defaults: never the test split
    python benchmarks/spam.py --timing                      # SpaM's time divided by MAP's, steps taking turns

MAP is ordinary training with weight decay. Every cell (experiment × method × seed) is a process with one torch thread;
as many run in parallel as there are cores. Tables are printed; NAME.csv and NAME.svg go into --folder. The data come
from the folder in SHAVER_DATA, or are downloaded. ``shaver run lenet-mnist`` and similar recipes compare more criteria.
"""

import argparse
import ast
import csv
import math
import os
import statistics
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

SPARSITIES = (0.0, 0.5, 0.8, 0.9, 0.95, 0.97, 0.98, 0.99, 0.995)
CRITERIA = ("opd", "magnitude")


@dataclass(frozen=True)
class Experiment:
    """A network, its data and the length of its training, the same for every method."""

    network: str
    data: str
    epochs: int
    batch_size: int = 128
    arguments: tuple[tuple[str, Any], ...] = ()
    seeds: int = 3


EXPERIMENTS = {
    "LeNet/MNIST": Experiment("lenet", "mnist", 30),
    "FCN/MNIST": Experiment("fcn", "mnist", 30),
    "LeNet/Fashion": Experiment("lenet", "fashion", 30),
    "CNN/digits": Experiment("digits_cnn", "digits", 60, 64),
    "FCN/cancer": Experiment(
        "fcn", "cancer", 100, 64, (("inputs", 30), ("hidden", (100, 100)), ("classes", 2)), seeds=5
    ),
}


def run_cell(
    name: str, method: str, label: str, spam: dict[str, Any], seed: int, split: str, scale: float, images: int | None
) -> list:
    import torch

    import shaver

    torch.set_num_threads(1)
    experiment = EXPERIMENTS[name]
    splits = shaver.data.load(
        experiment.data,
        seed=seed if experiment.data in ("cancer", "digits") else 0,
        valid_fraction=0.1 if split == "valid" else 0.0,
    )
    judged = (splits.valid if split == "valid" else splits.test).batches(1000)
    train = splits.train
    if images is not None:
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(seed))[:images]
        train = shaver.data.InMemory(*train[order])
    model = shaver.zoo.build(experiment.network, seed=seed, **dict(experiment.arguments))
    began = time.perf_counter()
    spam = dict(spam)
    lr, optimizer = spam.pop("lr", None), spam.pop("optimizer", "sgd")
    history = shaver.fit(
        model,
        train,
        method=method,
        epochs=max(1, round(scale * experiment.epochs)),
        batch_size=experiment.batch_size,
        optimizer=optimizer,
        lr=lr,
        seed=seed,
        spam=spam if method == "spam" else None,
    )
    seconds = time.perf_counter() - began
    posterior = history.posterior
    if posterior is None:  # MAP gets OPD from a curvature estimate after training, with its own prior
        curvature = shaver.curvature.estimate(model, train.batches(256), source="ggn")
        posterior = shaver.Posterior(curvature, 1.0, dict(model.named_parameters()))
    rows = []
    dense = {key: value.clone() for key, value in model.state_dict().items()}
    for criterion in CRITERIA:
        scores = shaver.score(model, criterion, posterior=posterior)
        for sparsity in SPARSITIES:
            shaver.prune(model, scores, sparsity)
            found = shaver.measure.quality(model, judged)
            model.load_state_dict(dense)
            rows.append(
                {
                    "experiment": name,
                    "method": method,
                    "settings": label,
                    "seed": seed,
                    "split": split,
                    "criterion": criterion,
                    "sparsity": sparsity,
                    **{k: v for k, v in found.as_dict().items() if k != "count"},
                    "relevant": history[-1].get("relevant", ""),
                    "seconds": round(seconds, 1),
                }
            )
    return rows


#: Networks whose steps are timed: input shape, samples per step, repetitions. GPT-2 has its usual optimizer, AdamW.
TIMED: dict[str, tuple[tuple[int, ...], int, int]] = {
    "lenet": ((1, 28, 28), 128, 60),
    "vit": ((1, 28, 28), 128, 20),
    "resnet18": ((3, 32, 32), 64, 2),
    "gpt2": ((256,), 4, 1),
}
#: Steps of the training whose time is computed: 30 epochs of MNIST.
STEPS = 14_070


def timed_network(name: str) -> tuple[Any, Any, Any]:
    """A network of :data:`TIMED`, its optimizer with weight decay (MAP), and without (SpaM)."""
    import torch

    import shaver

    if name != "gpt2":
        model = shaver.zoo.build(name, seed=0)
        return model, *(torch.optim.SGD(model.parameters(), 0.0, 0.9, weight_decay=decay) for decay in (1e-5, 0.0))
    import transformers

    # the tanh form of GELU in one kernel: the same function as the default's eight kernels, but one stored activation
    config = transformers.GPT2Config(activation_function="gelu_pytorch_tanh", attn_pdrop=0.0)
    model = transformers.GPT2LMHeadModel(config)
    return model, *(torch.optim.AdamW(model.parameters(), 0.0, weight_decay=decay) for decay in (1e-5, 0.0))


def timing(name: str) -> dict[str, float]:
    """SpaM's time divided by MAP's in a training of ``STEPS`` steps, from the processor time of each kind of step.

    Passes with and without a curvature measurement, steps of both trainings and updates of δ take turns in one process,
    on one network and random inputs, at a learning rate of zero. The smallest times, which other programs disturb
    least, are weighted by how often each occurs with the defaults and a cosine schedule from 0.05 to 1e-6. A step after
    an update, or after the learning rate has changed by a hundredth, computes the factors of the prior's step again.
    """
    import torch
    import torch.nn.functional as F

    import shaver
    from shaver.invariance import STEPS as SEARCHED
    from shaver.stepping import SAME

    torch.set_num_threads(1)
    shape, count, repeats = TIMED[name]
    model, plain, optimizer = timed_network(name)
    if name == "gpt2":
        x = torch.randint(50257, (count, *shape))
    else:
        x, y = torch.randn(count, *shape), torch.randint(0, 10, (count,))
    plain.state = optimizer.state  # in memory once
    spam = shaver.SpaM(model, 60_000, total_steps=STEPS)
    assert spam.online is not None
    measured = updates = 0
    table, spam.watch.has_settled = spam.timetable, True  # as if the loss settled at once, which costs most
    for table.steps in range(STEPS):  # how often each kind of step occurs
        measured += table.steps % table.spacing == 0
        updates += table.is_due
    table.steps, spam.scale_free.steps = 0, SEARCHED  # scale-free weights are looked for in the first steps only
    start = {key: value.clone() for key, value in model.state_dict().items()} if name != "gpt2" else None

    def passes() -> None:
        optimizer.zero_grad()
        (model(input_ids=x, labels=x).loss if name == "gpt2" else F.cross_entropy(model(x), y)).backward()

    seconds: dict[str, list[float]] = {}

    def timed(kind: str, act: Any) -> None:
        began = time.process_time()
        act()
        seconds.setdefault(kind, []).append(time.process_time() - began)

    def step(kind: str) -> None:
        table.steps, spam.online.steps = 0, 0 if kind == "measured step" else 1  # type: ignore[union-attr]
        timed("measured passes" if kind == "measured step" else "passes", passes)
        timed(kind, lambda: spam.step(optimizer))

    for _ in range(repeats + 1):
        step("measured step")
        timed("update", lambda: spam._update(spam.online.curvature(copied=False)))  # type: ignore[union-attr]
        step("SpaM step after an update")
        step("SpaM step")
        with spam.unobserved():
            timed("passes", passes)
        timed("MAP step", plain.step)
        if start is not None:
            model.load_state_dict(start)  # every repeat starts from the same weights
    found = {kind: min(times[1:]) for kind, times in seconds.items()}
    ordinary = found["passes"] + found["MAP step"]
    extra = found["measured passes"] - found["passes"] + found["measured step"] - found["SpaM step"]
    again = (updates + math.log(0.05 / 1e-6) / SAME) * (found["SpaM step after an update"] - found["SpaM step"])
    total = found["passes"] + found["SpaM step"] + (measured * extra + updates * found["update"] + again) / STEPS
    return {f"{kind}, ms": round(1000 * value, 2) for kind, value in found.items()} | {
        "ratio": round(total / ordinary, 3)
    }


def parse_settings(text: str) -> dict[str, Any]:
    """Convert ``a=1,b=x`` to a dict; values are Python literals where possible, else strings."""
    settings: dict[str, Any] = {}
    for item in filter(None, text.split(",")):
        key, value = item.split("=")
        try:
            settings[key] = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            settings[key] = value
    return settings


def summarise(rows: list[dict[str, Any]]) -> str:
    """One Markdown table per experiment: accuracy in %, mean ± standard error over seeds."""
    lines = []
    for name in dict.fromkeys(row["experiment"] for row in rows):
        mine = [row for row in rows if row["experiment"] == name]
        seeds = len({row["seed"] for row in mine})
        lines += [
            f"\n**{name}**, {seeds} seeds\n",
            "| training | criterion | " + " | ".join(map(_percent, SPARSITIES)) + " |",
        ]
        lines.append("|---|---|" + "---|" * len(SPARSITIES))
        for settings, criterion in product(dict.fromkeys(row["settings"] for row in mine), CRITERIA):
            cells = []
            for sparsity in SPARSITIES:
                values = [
                    100 * row["accuracy"]
                    for row in mine
                    if (row["settings"], row["criterion"], row["sparsity"]) == (settings, criterion, sparsity)
                ]
                error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
                cells.append(f"{statistics.mean(values):.2f} ± {error:.2f}" if values else "–")
            lines.append(f"| {settings} | {criterion} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _percent(sparsity: float) -> str:
    return "dense" if sparsity == 0 else f"{100 * sparsity:g} %"


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Draw accuracy over the share of weights kept by OPD: one panel per experiment, one line per training."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    names = list(dict.fromkeys(row["experiment"] for row in rows))
    trainings = list(dict.fromkeys(row["settings"] for row in rows))
    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False})
    plot, axes = plt.subplots(1, len(names), figsize=(3.1 * len(names), 3.0), squeeze=False, layout="constrained")
    colours = ["#999999", "#000000", *plt.get_cmap("tab10").colors]
    for axis, name in zip(axes[0], names, strict=True):
        for colour, training in zip(colours, trainings, strict=False):
            curve = []
            for sparsity in SPARSITIES:
                values = [
                    100 * row["accuracy"]
                    for row in rows
                    if (row["experiment"], row["settings"], row["criterion"], row["sparsity"])
                    == (name, training, "opd", sparsity)
                ]
                if values:
                    curve.append((1 - sparsity, statistics.mean(values)))
            axis.plot(
                *zip(*curve, strict=True),
                "o-",
                ms=3,
                color=colour,
                label=training,
                lw=2.2 if training == "SpaM" else 1.2,
            )
        dense = max(100 * row["accuracy"] for row in rows if row["experiment"] == name)
        axis.set(xscale="log", title=name, xlabel="share of weights kept", ylim=(dense - 12, dense + 1))
        axis.set_xticks([1, 0.1, 0.05, 0.02, 0.01], ["1", "0.1", ".05", ".02", ".01"])
        axis.minorticks_off()
        axis.invert_xaxis()
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("accuracy (%)")
    axes[0][0].legend(frameon=False, fontsize=8, loc="lower left")
    plot.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experiments", nargs="+", choices=list(EXPERIMENTS), default=list(EXPERIMENTS))
    parser.add_argument("--split", choices=("test", "valid"), default="test")
    parser.add_argument("--set", action="append", default=[], help="settings of SpaM, and lr: a=1,b=2; may be repeated")
    parser.add_argument("--paper", action="store_true", help="also run the paper's own algorithm, with GGN and EF")
    parser.add_argument("--seeds", type=int, help="three if left out; five for cancer")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the usual 30 epochs (100 for cancer)")
    parser.add_argument("--images", type=int, help="train on this many samples only, drawn anew for each seed")
    parser.add_argument("--timing", nargs="*", choices=list(TIMED), help="only the processor time of a step")
    parser.add_argument("--name", default="spam-benchmark")
    parser.add_argument("--folder", type=Path, default=Path("docs/results"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    if asked.timing is not None:
        for name in asked.timing or TIMED:
            print(name, timing(name), flush=True)
        return
    trainings: list[tuple[str, str, dict[str, Any]]] = [("map", "MAP", {})]
    trainings += [("spam", f"SpaM {text}".strip(), parse_settings(text)) for text in asked.set or [""]]
    if asked.paper:
        from shaver.settings import PAPER

        # Adam, as in the paper: the explicit gradient of the prior diverges under SGD where lr · δ/N > 2
        trainings.append(("spam", "paper, GGN", {"settings": PAPER, "optimizer": "adam"}))
        trainings.append(("spam", "paper, EF", {"settings": PAPER, "source": "ef", "optimizer": "adam"}))
    cells = [
        (name, method, label, spam, seed, asked.split, asked.scale, asked.images)
        for seed in range(max(asked.seeds or EXPERIMENTS[name].seeds for name in asked.experiments))
        for name in asked.experiments
        for method, label, spam in trainings
        if seed < (asked.seeds or EXPERIMENTS[name].seeds)
    ]
    asked.folder.mkdir(parents=True, exist_ok=True)
    rows: list[dict[str, Any]] = []
    with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool:
        jobs = {pool.submit(run_cell, *cell): cell for cell in cells}
        for number, job in enumerate(as_completed(jobs), 1):
            rows += job.result()
            print(f"{number}/{len(cells)}", *jobs[job][:3], f"seed {jobs[job][4]}", flush=True)
            rows.sort(key=lambda r: (list(EXPERIMENTS).index(r["experiment"]), r["method"], r["settings"], r["seed"]))
            with open(asked.folder / f"{asked.name}.csv", "w", newline="") as file:
                writer = csv.DictWriter(file, rows[0])
                writer.writeheader()
                writer.writerows(rows)
    figure(rows, asked.folder / f"{asked.name}.svg")
    print(summarise(rows))


if __name__ == "__main__":
    main()
