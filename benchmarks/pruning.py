r"""Pruning measured: automatic sparsity and the knee of the curve, pruning during training to 99 %, fine-tuning.

    python benchmarks/pruning.py                                   # all parts, test split: docs/results/pruning.csv
    python benchmarks/pruning.py --parts auto --experiments FCN/cancer
    python benchmarks/pruning.py --parts online --split valid --name online \
        --online schedule=linear --online schedule=cubic,end=0.5   # to choose settings: never the test split

auto      SpaM on the four experiments of benchmarks/spam.py: automatic sparsity and the plain threshold S > 1. The knee
          is the highest sparsity of the OPD curve that loses at most 0.15 points of the dense network's accuracy.
online    LeNet/MNIST to 99 %, pruned during and after training, by SpaM (OPD) and MAP (magnitude).
finetune  LeNet/MNIST by MAP and SpaM: every criterion at 90, 95 and 99 %, then MAP epochs with the masks held.

MAP is ordinary training with weight decay; OPD is optimal posterior damage, SpaM's own score. Every cell is a process
with one torch thread; as many run in parallel as there are cores. Trained networks are kept in --runs and reused while
the settings and the library's source stay the same. A part that is measured again replaces its rows in the CSV file.
--study reuses the networks of ``shaver run lenet-mnist`` and similar recipes. The data come from the folder in
SHAVER_DATA, or are downloaded.
"""

import argparse
import csv
import json
import os
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cells import Cell, Row, Setting, data_of, digest_of, posterior_of, run_cells, write
from spam import EXPERIMENTS, parse_settings

PARTS = ("auto", "online", "finetune")
#: Sparsities of the curve, finer where curves bend.
GRID = (0.0, 0.5, 0.6, 0.7, *(x / 100 for x in range(75, 90)), *(x / 500 for x in range(450, 500)), 0.999)
#: The accuracy that may be lost at the knee.
TOLERATED = 0.0015
SPARSITIES = (0.9, 0.95, 0.99)
TARGET, SHOWCASE = 0.99, "LeNet/MNIST"
TUNING_LR = 0.01


@dataclass(frozen=True, kw_only=True)
class PruningSetting(Setting):
    """Settings that all cells share."""

    spam: str
    budgets: tuple[int, ...]
    study: tuple[str, ...]


def prepare(setting: PruningSetting, name: str, method: str, seed: int) -> dict[str, Any]:
    """The data and the trained network of an experiment, read from its folder if it was trained before."""
    import shaver
    from shaver.files import load_trained

    found = data_of(setting, name, seed)
    for path in studied(setting, name, method, seed):
        trained = load_trained(path)
        return found | {"model": trained.model, "posterior": trained.posterior}
    folder = Path(setting.runs) / f"{name.replace('/', '-')}-{method}-{seed}-{setting.digest}"
    history = shaver.fit(found["model"], found["train"], folder=folder, **training(setting, name, method, seed))
    return found | {"posterior": history.posterior}


def studied(setting: PruningSetting, name: str, method: str, seed: int) -> Iterator[Path]:
    """Networks of this experiment in the run folders of a study, trained on all training data."""
    task = name.replace("/", "-").lower()
    prior = "parameter" if method == "spam" else ""
    for config in (path for folder in setting.study for path in sorted(Path(folder).glob("cells/*/config.json"))):
        cell = json.loads(config.read_text())
        labels = cell["training"]["labels"]
        network = config.with_name("model.safetensors")
        known = (cell["task"], labels["method"], labels["prior"], labels["seed"], cell["training"]["online"])
        if known == (task, method, prior, seed, None) and setting.split == "test" and network.exists():
            yield network


def training(setting: PruningSetting, name: str, method: str, seed: int) -> dict[str, Any]:
    """The arguments of ``fit``, the same with and without pruning during training."""
    spam = parse_settings(setting.spam)
    return {
        "method": method,
        "epochs": max(1, round(setting.scale * EXPERIMENTS[name].epochs)),
        "batch_size": EXPERIMENTS[name].batch_size,
        "lr": spam.pop("lr", None),
        "spam": spam if method == "spam" else None,
        "seed": seed,
    }


def train_cell(setting: PruningSetting, name: str, method: str, seed: int) -> list[Row]:
    prepare(setting, name, method, seed)
    return []


def auto_cell(setting: PruningSetting, name: str, seed: int) -> list[Row]:
    """The accuracy curve by OPD, and the sparsity and accuracy that automatic sparsity reaches."""
    import shaver

    found = prepare(setting, name, "spam", seed)
    model, posterior = found["model"], posterior_of(found)
    weights = {key: value.clone() for key, value in model.state_dict().items()}

    def accuracy() -> float:
        measured = shaver.measure.quality(model, found["judged"]).accuracy
        model.load_state_dict(weights)
        return measured

    rows = []
    scores = shaver.score(model, "opd", posterior=posterior)
    for sparsity, mask in zip(GRID, map(shaver.pruning.Ranking(scores).at, GRID), strict=True):
        mask.apply_(model)
        rows.append({"kind": "curve", "sparsity": sparsity, "accuracy": accuracy()})
    report = shaver.prune(model, None, "auto", posterior=posterior)
    landed = {"kind": "auto", "sparsity": report.achieved, "accuracy": accuracy()}
    landed |= {"evidence_change": report.evidence_change, "loss_rise": report.loss_rise}
    plain = shaver.pruning.Masks({name: values > 1 for name, values in scores.items()})
    plain.apply_(model)
    threshold = {"kind": "S > 1", "sparsity": plain.sparsity, "accuracy": accuracy()}
    label = {"part": "auto", "experiment": name, "method": "spam", "seed": seed, "split": setting.split}
    return [label | row for row in [*rows, landed, threshold]]


def online_cell(setting: PruningSetting, method: str, how: str, seed: int) -> list[Row]:
    """Pruning during training with the settings ``how``, or after it if ``how`` is ``"after training"``."""
    import shaver

    label = {"part": "online", "experiment": SHOWCASE, "method": method, "seed": seed, "split": setting.split}
    if how == "after training":
        found = prepare(setting, SHOWCASE, method, seed)
        criterion = "opd" if method == "spam" else "magnitude"
        posterior = posterior_of(found) if criterion == "opd" else None
        scores = shaver.score(found["model"], criterion, posterior=posterior)
        dense = shaver.measure.quality(found["model"], found["judged"]).accuracy
        reached = shaver.prune(found["model"], scores, TARGET).achieved
        accuracy = shaver.measure.quality(found["model"], found["judged"]).accuracy
        return [label | {"kind": how, "sparsity": reached, "accuracy": accuracy, "dense": dense}]
    found = data_of(setting, SHOWCASE, seed)
    model = found["model"]
    began = time.perf_counter()
    online = shaver.pruning.Online(TARGET, **parse_settings(how))
    history = shaver.fit(model, found["train"], online=online, **training(setting, SHOWCASE, method, seed))
    measured = {
        "sparsity": history[-1]["sparsity"],
        "accuracy": shaver.measure.quality(model, found["judged"]).accuracy,
    }
    return [label | {"kind": f"online {how}".strip(), "epochs": len(history)} | measured
            | {"seconds": round(time.perf_counter() - began, 1)}]  # fmt: skip


def finetune_cell(setting: PruningSetting, method: str, criterion: str, seed: int) -> list[Row]:
    """One criterion at each sparsity, before and after fine-tuning with the masks held."""
    import shaver

    found = prepare(setting, SHOWCASE, method, seed)
    model = found["model"]
    needs = shaver.criteria.needs(criterion)
    posterior = posterior_of(found) if "posterior" in needs else None
    scores = shaver.score(model, criterion, posterior=posterior, batches=found["train"].batches(256), seed=seed)
    weights = {key: value.clone() for key, value in model.state_dict().items()}
    label = {"part": "finetune", "experiment": SHOWCASE, "method": method, "seed": seed, "split": setting.split}
    rows = []
    for sparsity in SPARSITIES:
        for budget in (0, *setting.budgets):
            model.load_state_dict(weights)
            masks = shaver.prune(model, scores, sparsity).masks
            if budget:
                shaver.fit(model, found["train"], method="map", epochs=budget, lr=TUNING_LR, masks=masks, seed=seed)
            kept = sum(int(parameter.count_nonzero()) for parameter in masks.parameters(model).values())
            assert kept <= masks.kept, "a pruned weight has grown back"
            accuracy = shaver.measure.quality(model, found["judged"]).accuracy
            rows.append({"kind": criterion, "sparsity": sparsity, "epochs": budget, "accuracy": accuracy})
    return [label | row for row in rows]


def knee(curve: dict[float, float]) -> float:
    """The highest sparsity that loses no more accuracy than tolerated."""
    return max(sparsity for sparsity, accuracy in curve.items() if accuracy >= curve[0.0] - TOLERATED - 1e-9)


def summarise(rows: list[Row]) -> str:
    """Markdown tables, one per measured part."""
    tables = {"auto": auto_table, "online": online_table, "finetune": finetune_table}
    parts = [tables[part]([row for row in rows if row["part"] == part]) for part in PARTS]
    return "\n".join(part for part in parts if part)


def auto_table(rows: list[Row]) -> str:
    if not rows:
        return ""
    lines = [
        "**Automatic sparsity**, no validation data. The knee is the highest sparsity that loses at most "
        f"{100 * TOLERATED:.2f} points. Accuracy and sparsity in %, mean ± standard error over seeds.\n",
        "| experiment | seeds | dense accuracy | rule | sparsity | accuracy | accuracy lost | knee | "
        "sparsity minus knee | knee of the mean curve |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name in dict.fromkeys(row["experiment"] for row in rows):
        mine = [row for row in rows if row["experiment"] == name]
        curves: dict[int, dict[float, float]] = {}
        for row in mine:
            if row["kind"] == "curve":
                curves.setdefault(row["seed"], {})[row["sparsity"]] = row["accuracy"]
        mean = {s: statistics.fmean(curve[s] for curve in curves.values()) for s in GRID}
        for kind in ("auto", "S > 1"):
            landed = {row["seed"]: row for row in mine if row["kind"] == kind}
            cells = [
                spread([curve[0.0] for curve in curves.values()]),
                kind,
                spread([row["sparsity"] for row in landed.values()]),
                spread([row["accuracy"] for row in landed.values()]),
                spread([curves[seed][0.0] - row["accuracy"] for seed, row in landed.items()]),
                spread([knee(curve) for curve in curves.values()]),
                spread([row["sparsity"] - knee(curves[seed]) for seed, row in landed.items()]),
                f"{100 * knee(mean):.2f}",
            ]
            lines.append(f"| {name} | {len(curves)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def online_table(rows: list[Row]) -> str:
    if not rows:
        return ""
    lines = [
        f"**{SHOWCASE} at {100 * TARGET:g} %**, pruned during training and after it. Accuracy in %.\n",
        "| training | pruned | seeds | accuracy | lowest seed | sparsity |",
        "|---|---|---|---|---|---|",
    ]
    for method, kind in dict.fromkeys((row["method"], row["kind"]) for row in rows):
        mine = [row for row in rows if (row["method"], row["kind"]) == (method, kind)]
        values = [row["accuracy"] for row in mine]
        cells = [spread(values), f"{100 * min(values):.2f}", spread([row["sparsity"] for row in mine])]
        lines.append(f"| {method} | {kind} | {len(mine)} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def finetune_table(rows: list[Row]) -> str:
    if not rows:
        return ""
    budgets = sorted({int(row["epochs"]) for row in rows})
    columns = [(sparsity, budget) for sparsity in SPARSITIES for budget in budgets]
    lines = [
        f"**Fine-tuning {SHOWCASE}** with the masks held, MAP at lr {TUNING_LR:g}, "
        f"{len({row['seed'] for row in rows})} seeds. Accuracy in % after the given number of epochs.\n",
        "| training | criterion | " + " | ".join(f"{100 * s:g} %, {b} ep." for s, b in columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    for method, kind in dict.fromkeys((row["method"], row["kind"]) for row in rows):
        cells = []
        for column in columns:
            values = [
                row["accuracy"]
                for row in rows
                if (row["method"], row["kind"], row["sparsity"], int(row["epochs"])) == (method, kind, *column)
            ]
            cells.append(f"{100 * statistics.fmean(values):.2f}" if values else "–")
        lines.append(f"| {method} | {kind} | " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def spread(values: list[float]) -> str:
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return f"{100 * statistics.fmean(values):.2f} ± {100 * error:.2f}"


def read(path: Path) -> list[Row]:
    """The rows of an earlier call, with numbers converted."""
    if not path.exists():
        return []
    numbers = {"seed": int, "sparsity": float, "accuracy": float}
    with open(path, newline="") as file:
        return [{k: numbers.get(k, str)(v) for k, v in row.items() if v != ""} for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--experiments",
        nargs="+",
        choices=list(EXPERIMENTS),
        default=list(EXPERIMENTS),
        help="experiments of the part auto",
    )
    parser.add_argument("--split", choices=("test", "valid"), default="test")
    parser.add_argument("--set", default="", help="settings of SpaM, and lr: a=1,b=2")
    parser.add_argument("--online", action="append", default=[], help="settings of Online: a=1,b=2; may be repeated")
    parser.add_argument("--budgets", nargs="+", type=int, default=[1, 5], help="epochs of fine-tuning")
    parser.add_argument("--criteria", nargs="+", help="criteria of the part finetune; all if left out")
    parser.add_argument("--seeds", type=int, help="default: three; five for cancer, one for finetune")
    parser.add_argument("--scale", type=float, default=1.0, help="factor on the usual 30 epochs (100 for cancer)")
    parser.add_argument("--name", default="pruning")
    parser.add_argument("--folder", type=Path, default=Path("docs/results"))
    parser.add_argument("--study", nargs="+", default=[], help="run folders of `shaver run` whose networks are reused")
    parser.add_argument("--runs", type=Path, default=Path("runs/pruning"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    from shaver import criteria

    setting = PruningSetting(
        split=asked.split,
        scale=asked.scale,
        runs=str(asked.runs),
        digest=digest_of(asked.split, asked.scale, asked.set),
        spam=asked.set,
        budgets=tuple(asked.budgets),
        study=tuple(asked.study),
    )
    networks: dict[tuple[str, str, int], None] = {}
    cells: list[Cell] = []
    if "auto" in asked.parts:
        for name in asked.experiments:
            for seed in range(asked.seeds or EXPERIMENTS[name].seeds):
                networks[name, "spam", seed] = None
                cells.append((auto_cell, (name, seed)))
    for method in ("spam", "map"):
        for seed in range(asked.seeds or 3) if "online" in asked.parts else ():
            networks[SHOWCASE, method, seed] = None
            cells += [(online_cell, (method, how, seed)) for how in ["after training", *(asked.online or [""])]]
        for seed in range(asked.seeds or 1) if "finetune" in asked.parts else ():
            networks[SHOWCASE, method, seed] = None
            cells += [(finetune_cell, (method, c, seed)) for c in asked.criteria or criteria.names()]
    asked.folder.mkdir(parents=True, exist_ok=True)
    path = asked.folder / f"{asked.name}.csv"
    rows = [row for row in read(path) if row["part"] not in asked.parts]
    # Two rounds, because several cells use the same trained network.
    for round_ in ([(train_cell, network) for network in networks], cells):
        for found in run_cells(setting, round_, asked.jobs):
            rows += found
            if rows:
                rows.sort(key=lambda r: (PARTS.index(r["part"]), r["experiment"], r["method"] == "map", r["seed"]))
                write(path, rows)
    print(summarise(rows))


if __name__ == "__main__":
    main()
