r"""Language models on IMDB: SpaM beside MAP, pruned by five criteria; heads and widths removed; memory at GPT-2's size.

    python benchmarks/language.py minilm --vocabularies FOLDER          # (a) a pretrained encoder, fine-tuned
    python benchmarks/language.py small-gpt --vocabularies FOLDER       # (b) a GPT from scratch, GPT-2's vocabulary
    python benchmarks/language.py small-gpt-words --vocabularies FOLDER #     the same, predicting the next word
    python benchmarks/language.py minilm --structured                   # (d) heads and widths of the trained network
    python benchmarks/language.py distilbert gpt2 --weights FOLDER      # the paper's, from local folders
    python benchmarks/language.py distilbert gpt2 --vocabularies FOLDER --steps 3 --length 64   # true size, random
    python benchmarks/language.py --memory                              # peak memory of a step at GPT-2's size

FOLDER holds ``bert-base-uncased-vocab/vocab.txt`` and ``gpt2-bpe/{encoder.json,vocab.bpe}``. Every cell
(experiment × training × seed) is a process with one torch thread. ``map`` and ``spam`` are trainings; ``two-steps`` is
the MAP network with OPD from two SpaM steps after training, as the paper does for GPT-2. The data come from the folder
in SHAVER_DATA, or are downloaded. Nothing else is: the hub stays offline.
"""

import argparse
import csv
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

SPARSITIES = (0.2, 0.4, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
CRITERIA = ("opd", "magnitude", "grasp", "snip", "random")
TRAININGS = ("map", "spam", "two-steps")


def cell(task: Any, training: str, seed: int, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Train one network, and prune it by every criterion to every sparsity."""
    import torch

    import shaver
    from shaver.study.language import after_the_fact, build_reader, reviews, train_reader

    torch.set_num_threads(1)
    model, tokenizer = build_reader(
        task, weights=asked["weights"], vocabulary=_vocabulary(asked["vocabularies"], task.network), seed=seed
    )
    train, test = reviews(task, tokenizer)
    if asked["steps"]:
        few = slice(asked["steps"] * task.batch_size)
        train = shaver.data.InMemory(train.inputs[few], train.targets[few], classes=train.classes)
    began = time.perf_counter()
    method = "spam" if training == "spam" else "map"
    folder = Path(asked["runs"]) / f"{task.name}-{method}-{seed}"
    history = train_reader(model, train, task, method, seed=seed, folder=folder, progress=asked["jobs"] == 1)
    seconds = time.perf_counter() - began
    posterior = history.posterior
    if training == "two-steps":
        posterior = after_the_fact(model, train, task, seed=seed)
    elif posterior is None:
        curvature = shaver.curvature.estimate(
            model, train.batches(task.batch_size), source="ef", max_samples=min(asked["scored"], len(train))
        )
        posterior = shaver.Posterior(curvature, 1.0, dict(model.named_parameters()))
    common = {"experiment": task.name, "training": training, "seed": seed, "epochs": task.epochs,
              "train": len(train), "test": len(test), "scored": min(asked["scored"], len(train)),
              "train_seconds": round(seconds, 1)}  # fmt: skip
    if asked["structured"]:
        return [common | row for row in structured(model, posterior, train, test, asked)]
    judged = list(test.batches(64))
    few = slice(asked["scored"])
    part = shaver.data.InMemory(train.inputs[few], train.targets[few], classes=train.classes)
    dense = {key: value.clone() for key, value in model.state_dict().items()}
    unpruned = shaver.measure.quality(model, judged).as_dict()
    rows: list[dict[str, Any]] = []
    for criterion in CRITERIA if training != "two-steps" else ("opd",):
        given: dict[str, Any] = {"batches": part.batches(8)} if criterion in ("snip", "grasp") else {}
        scores = shaver.score(model, criterion, posterior=posterior, seed=seed, **given)
        rows.append(common | {"criterion": criterion, "sparsity": 0.0} | unpruned)
        for sparsity in asked["sparsities"]:
            shaver.prune(model, scores, sparsity)
            found = shaver.measure.quality(model, judged).as_dict()
            model.load_state_dict(dense)
            rows.append(common | {"criterion": criterion, "sparsity": sparsity} | found)
        # what a run that is cut short leaves behind
        write(rows, folder / f"{training}.csv")
    return rows


def structured(model: Any, posterior: Any, train: Any, test: Any, asked: dict[str, Any]) -> list[dict[str, Any]]:
    """Remove heads and widths, compact, and measure what is left: quality, size, FLOPs and latency."""
    import shaver
    from shaver.structure import compact_with_report, find_groups

    example, judged = test.inputs[:2], list(test.batches(64))
    groups = find_groups(model, example)
    rows = []
    before = shaver.measure.latency(model, example, batch_size=1)
    for criterion, sparsity in product(("opd", "magnitude", "random"), (0.0, 0.25, 0.5, 0.75)):
        small, facts = model, {}
        if sparsity:
            done = compact_with_report(
                model, example, criterion=criterion, posterior=posterior, sparsity=sparsity, groups=groups
            )
            small = done.model
        after = shaver.measure.latency(small, example, batch_size=1) if sparsity else before
        facts = {
            "parameters": sum(p.numel() for p in small.parameters()),
            "flops": shaver.measure.cost(small, example, latency=False).flops,
            "latency_ms": round(1000 * after.median, 2),
            "spread_ms": round(1000 * after.spread, 2),
        }
        found = shaver.measure.quality(small, judged).as_dict()
        rows.append({"criterion": criterion, "sparsity": sparsity} | found | facts)
    return rows


def _vocabulary(folder: str | None, network: str) -> Path | None:
    if folder is None:
        return None
    return Path(folder) / ("gpt2-bpe" if "gpt" in network else "bert-base-uncased-vocab")


# Memory ---------------------------------------------------------------------------------------------------------


def memory_child(source: str, batch: int, length: int, steps: int) -> dict[str, float]:
    """Peak resident memory of a few AdamW steps on a causal GPT-2 of 124 M random weights, and seconds a step."""
    import resource

    import torch
    import transformers

    import shaver

    torch.set_num_threads(1)
    # GELU's tanh form in one kernel is the same function as the default's eight, and keeps one activation, not eight
    config = transformers.GPT2Config(activation_function="gelu_pytorch_tanh", attn_pdrop=0.0)
    model = transformers.GPT2LMHeadModel(config)
    weights = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, foreach=False)
    spam = None
    if source != "map":
        spam = shaver.SpaM(model, 25000, source=source, every=1, update=2, burn_in=0.0)
    generator = torch.Generator().manual_seed(0)
    times = []
    for _ in range(steps):
        ids = torch.randint(50257, (batch, length), generator=generator)
        began = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step() if spam is None else spam.step(optimizer)
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    found = {"weights": weights, "peak": peak, "seconds": statistics.median(times), "first": times[0]}
    generic = [] if spam is None else [rule for rule in spam.curvature.rules.values() if "generic" in rule]
    return found | {"generic": len(generic)}


def memory(batch: int, length: int, steps: int) -> str:
    """A Markdown table: MAP, EF and MC in processes of their own."""
    lines = [
        f"GPT-2, 124 M random weights, AdamW, {batch} × {length} tokens, one thread, GELU in one kernel, no dropout of "
        "attention.\n",
        "| training | peak memory (GiB) | beyond MAP, numbers a weight | seconds a step | the first step |",
        "|---|---|---|---|---|",
    ]
    least = 0.0
    for source in ("map", "ef", "mc"):
        command = [sys.executable, __file__, "--memory-child", source, str(batch), str(length), str(steps)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        least = least or found["peak"]
        extra = (found["peak"] - least) / 4 / found["weights"]
        name = "MAP" if source == "map" else f"SpaM, {source.upper()}"
        lines.append(
            f"| {name} | {found['peak'] / 2**30:.2f} | {extra:.2f} | {found['seconds']:.1f} | {found['first']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def write(rows: list[dict[str, Any]], path: Path) -> None:
    """All rows so far as a CSV."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(key for row in rows for key in row)))
        writer.writeheader()
        writer.writerows(rows)


# Tables and figures ---------------------------------------------------------------------------------------------


def table(rows: list[dict[str, Any]]) -> str:
    """Accuracy in % (mean over seeds) by training, criterion and sparsity, one table an experiment."""
    lines = []
    for name in dict.fromkeys(row["experiment"] for row in rows):
        mine = [row for row in rows if row["experiment"] == name]
        sparsities = sorted({float(row["sparsity"]) for row in mine})
        heads = ["dense" if s == 0 else f"{100 * s:g} %" for s in sparsities]
        lines += [f"\n**{name}**, {len({row['seed'] for row in mine})} seeds\n"]
        lines += ["| training | criterion | " + " | ".join(heads) + " |", "|---|---|" + "---|" * len(heads)]
        for training, criterion in dict.fromkeys((row["training"], row["criterion"]) for row in mine):
            cells = []
            for sparsity in sparsities:
                values = [
                    100 * float(row["accuracy"])
                    for row in mine
                    if (row["training"], row["criterion"], float(row["sparsity"])) == (training, criterion, sparsity)
                ]
                error = f" ± {statistics.stdev(values) / len(values) ** 0.5:.2f}" if len(values) > 1 else ""
                cells.append(f"{statistics.mean(values):.2f}{error}" if values else "–")
            lines.append(f"| {training} | {criterion} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def figure(rows: list[dict[str, Any]], path: Path) -> None:
    """Accuracy over sparsity: a panel for each experiment and training, a line for each criterion."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": 9, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False})
    panels = list(dict.fromkeys((row["experiment"], row["training"]) for row in rows))
    plot, axes = plt.subplots(1, len(panels), figsize=(3.1 * len(panels), 3.0), squeeze=False, layout="constrained",
                              sharey=True)  # fmt: skip
    for axis, (name, training) in zip(axes[0], panels, strict=True):
        mine = [row for row in rows if (row["experiment"], row["training"]) == (name, training)]
        for criterion in dict.fromkeys(row["criterion"] for row in mine):
            points: dict[float, list[float]] = {}
            for row in mine:
                if row["criterion"] == criterion:
                    points.setdefault(100 * float(row["sparsity"]), []).append(100 * float(row["accuracy"]))
            curve = sorted((x, statistics.mean(y)) for x, y in points.items())
            axis.plot(*zip(*curve, strict=True), "o-", ms=3, lw=2.2 if criterion == "opd" else 1.2, label=criterion)
        axis.set(title=f"{name}, {training}", xlabel="sparsity (%)")
        axis.grid(alpha=0.25)
    axes[0][0].set_ylabel("accuracy (%)")
    axes[0][0].legend(frameon=False, fontsize=8)
    plot.savefig(path)


def main() -> None:
    if sys.argv[1:2] == ["--memory-child"]:
        print(json.dumps(memory_child(sys.argv[2], *map(int, sys.argv[3:6]))))
        return
    from shaver.study.language import TASKS

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("experiments", nargs="*", help="of " + ", ".join(TASKS))
    parser.add_argument("--trainings", nargs="+", choices=TRAININGS, default=list(TRAININGS))
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--weights", help="a local folder with pretrained weights and their tokenizer")
    parser.add_argument("--vocabularies", help="the folder of the vocabularies, for networks without weights")
    for name in ("train", "test", "epochs", "length", "batch-size"):
        parser.add_argument(f"--{name}", type=int, help="instead of the experiment's own")
    parser.add_argument("--steps", type=int, help="train on so many batches an epoch only, to see that all works")
    parser.add_argument("--sparsities", type=float, nargs="+", default=list(SPARSITIES))
    parser.add_argument("--scored", type=int, default=512, help="training reviews that SNIP, GraSP and curvature see")
    parser.add_argument("--structured", action="store_true", help="heads and widths instead of single weights")
    parser.add_argument("--memory", action="store_true", help="only the memory of steps at GPT-2's size")
    parser.add_argument("--memory-batch", type=int, nargs=2, default=(8, 256), metavar=("SAMPLES", "TOKENS"))
    parser.add_argument("--runs", default="runs/language", help="where training's checkpoints go")
    parser.add_argument("--folder", type=Path, default=Path("docs/results"))
    parser.add_argument("--name", default="language")
    parser.add_argument("--jobs", type=int, default=1, help="cells side by side")
    asked = parser.parse_args()
    if asked.memory:
        text = memory(*asked.memory_batch, steps=3)
        print(text)
        asked.folder.mkdir(parents=True, exist_ok=True)
        (asked.folder / f"{asked.name}-memory.md").write_text(text, encoding="utf-8")
        return
    if not asked.experiments or not set(asked.experiments) <= set(TASKS):
        parser.error("name experiments of: " + ", ".join(TASKS))
    changed = {key: getattr(asked, key) for key in ("train", "test", "epochs", "length", "batch_size")}
    tasks = [
        dataclasses.replace(TASKS[name], **{key: value for key, value in changed.items() if value is not None})
        for name in asked.experiments
    ]
    jobs = list(product(tasks, asked.trainings, range(asked.seeds)))
    rows: list[dict[str, Any]] = []
    out = asked.folder / f"{asked.name}{'-structured' if asked.structured else ''}.csv"
    out.parent.mkdir(parents=True, exist_ok=True)
    # a two-steps cell takes over the network that the MAP cell before it has trained, so MAP comes first
    for wave in (("map", "spam"), ("two-steps",)):
        cells = [job for job in jobs if job[1] in wave]
        with ProcessPoolExecutor(asked.jobs, mp_context=get_context("spawn")) as pool:
            futures = {pool.submit(cell, *job, vars(asked)): job for job in cells}
            for future in as_completed(futures):
                rows += future.result()
                task, training, seed = futures[future]
                print(f"{task.name}, {training}, seed {seed}: {rows[-1]['train_seconds']} s of training", flush=True)
                write(rows, out)
    text = table(rows)
    out.with_suffix(".md").write_text(text, encoding="utf-8")
    figure(rows, out.with_suffix(".svg"))
    print(text)


if __name__ == "__main__":
    main()
