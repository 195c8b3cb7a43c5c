r"""Structured pruning measured: compact networks by every criterion, and the same widths trained from scratch.

    python benchmarks/structured.py                 # all parts: docs/results/structured.csv and .svg; prints tables
    python benchmarks/structured.py --parts gradual rivals --experiments LeNet/Fashion --seeds 1
    python benchmarks/structured.py --parts gradual --split valid --name gradual --gradual start=0.1,end=0.6

oneshot  MAP and SpaM (unit and parameter prior), compacted by each criterion with the same share of each layer, before
         and after fine-tuning.
scratch  The same widths from new weights, trained for as many epochs as the whole pipeline.
free     A target in FLOPs instead of uniform widths: OPD's widths under each normalisation, fine-tuned.
gradual  Units removed during training by SpaM or MAP, for as many epochs as the whole pipeline.
rivals   torch-pruning with its L2, Taylor and Hessian importances, at equal FLOPs, fine-tuned.
latency  The latency of every set of widths in the table; runs alone, after the other parts.
speed    ResNet-18 and ViT: compact networks and networks built at those widths, and the effect of round_to; runs alone.

MAP is ordinary training with weight decay; OPD is optimal posterior damage, SpaM's own score. Every cell is a process
with one torch thread; as many run in parallel as there are cores. Trained networks are kept in --runs and reused while
the settings and the library's source stay the same. Calls add their rows to one CSV file; a repeated measurement
replaces its row. The data come from the folder in SHAVER_DATA, or are downloaded.
"""

import argparse
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cells import Cell, Row, Setting, data_of, digest_of, posterior_of, run_cells, write
from spam import EXPERIMENTS, parse_settings
from structured_report import figure, read, summarise, tidy
from structured_rivals import IMPORTANCES, SAMPLES
from structured_speed import NETWORKS, speed, turns

PARTS = ("oneshot", "scratch", "free", "gradual", "rivals", "latency", "speed")
CRITERIA = ("opd", "magnitude", "snip", "grasp", "synflow", "random")
TRAININGS: dict[str, tuple[str, dict[str, Any]]] = {
    "SpaM unit": ("spam", {"prior": "unit"}),
    "SpaM parameter": ("spam", {"prior": "parameter"}),
    "MAP": ("map", {}),
}
SPARSITIES = (0.2, 0.4, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)
#: How many times fewer FLOPs, for the parts with a target in FLOPs.
RATIOS = (2.5, 4.6, 5.6, 8.0, 11.0, 16.0)
#: Epochs of training before pruning; --tune epochs follow.
EPOCHS = {"LeNet/Fashion": 10, "LeNet/MNIST": 10, "FCN/MNIST": 10, "FCN/cancer": 100}
SHOWCASE = "LeNet/Fashion"
#: Further widths to train from scratch, to compare with earlier measurements.
KNOWN_WIDTHS = {SHOWCASE: ((2, 8, 30, 20), (2, 5, 24, 17), (1, 4, 24, 17))}


@dataclass(frozen=True, kw_only=True)
class StructuredSetting(Setting):
    """Settings that all cells share."""

    tune: int
    tune_lr: float
    sparsities: tuple[float, ...]
    tuned: tuple[float, ...]
    ratios: tuple[float, ...]

    def epochs(self, experiment: str) -> int:
        """Epochs of training, before fine-tuning."""
        return max(1, round(self.scale * EPOCHS[experiment]))


def prepare(setting: StructuredSetting, name: str, training: str, seed: int) -> dict[str, Any]:
    """The data and the trained network of an experiment, read from its folder if it was trained before."""
    import shaver

    found = data_of(setting, name, seed)
    method, spam = TRAININGS[training]
    folder = Path(setting.runs) / f"{name}-{training}-{seed}-{setting.digest}".replace("/", "-").replace(" ", "-")
    history = shaver.fit(
        found["model"],
        found["train"],
        method=method,
        epochs=setting.epochs(name),
        batch_size=EXPERIMENTS[name].batch_size,
        spam=spam or None,
        seed=seed,
        folder=folder,
    )
    return found | {"posterior": history.posterior}


def measured(found: dict[str, Any], network: Any) -> Row:
    """Quality, size and widths of a network."""
    import shaver

    row = {k: v for k, v in shaver.measure.quality(network, found["judged"]).as_dict().items() if k != "count"}
    cost = shaver.measure.cost(network, found["example"])
    widths = "-".join(map(str, widths_of(found, network)))
    return row | {"flops": cost.flops, "parameters": cost.parameters, "bytes": cost.bytes_dense, "widths": widths}


def widths_of(found: dict[str, Any], network: Any) -> list[int]:
    """The number of units left in each group of the original network, whichever library removed the others."""
    from shaver.structure import find_groups

    parameters = dict(network.named_parameters())
    widths = []
    for group in find_groups(found["model"], found["example"]).values():
        piece = next(piece for piece in group.slices if piece.role == "makes" and piece.tensor in parameters)
        widths.append(parameters[piece.tensor].shape[piece.dim] // piece.index.shape[1])
    return widths


def tune(setting: StructuredSetting, found: dict[str, Any], network: Any, name: str, seed: int) -> Row:
    """Fine-tune by MAP and measure."""
    import shaver

    batch_size = EXPERIMENTS[name].batch_size
    shaver.fit(network, found["train"], method="map", epochs=setting.tune, lr=setting.tune_lr,
               batch_size=batch_size, seed=seed)  # fmt: skip
    return measured(found, network) | {"tuned": setting.tune}


def train_cell(setting: StructuredSetting, name: str, training: str, seed: int) -> list[Row]:
    found = prepare(setting, name, training, seed)
    label = {"part": "oneshot", "experiment": name, "training": training, "seed": seed, "split": setting.split}
    return [label | {"kind": "dense", "sparsity": 0.0, "tuned": 0} | measured(found, found["model"])]


def scores_of(found: dict[str, Any], criterion: str, seed: int) -> tuple[Any, dict[str, Any]]:
    """Groups and unit scores of the trained network."""
    import shaver
    from shaver.structure import find_groups, score_units

    groups = find_groups(found["model"], found["example"])
    given: dict[str, Any] = {"seed": seed, "batches": found["train"].batches(256)}
    if "posterior" in shaver.criteria.needs(criterion):
        given["posterior"] = posterior_of(found)
    return groups, score_units(found["model"], groups, criterion, **given)


def oneshot_cell(setting: StructuredSetting, name: str, training: str, criterion: str, seed: int) -> list[Row]:
    """One criterion at each sparsity with uniform widths, before and after fine-tuning."""
    from shaver.structure import ChoiceOptions, Chooser, remove_units

    found = prepare(setting, name, training, seed)
    groups, scores = scores_of(found, criterion, seed)
    label = {"part": "oneshot", "experiment": name, "training": training, "kind": criterion, "seed": seed}
    rows = []
    for sparsity in setting.sparsities:
        chosen = Chooser(found["model"], groups, ChoiceOptions()).choose(scores, sparsity)
        small = remove_units(found["model"], groups, chosen.kept, found["example"]).model
        row = label | {"split": setting.split, "sparsity": sparsity}
        rows.append(row | {"tuned": 0} | measured(found, small))
        if setting.tune and sparsity in setting.tuned:
            rows.append(row | tune(setting, found, small, name, seed))
    return rows


def at_widths(found: dict[str, Any], widths: tuple[int, ...], seed: int) -> Any:
    """The experiment's network at other widths, with new weights."""
    import torch

    from shaver.structure import find_groups, remove_units

    groups = find_groups(found["model"], found["example"])
    kept = {g: torch.arange(group.units) < width for (g, group), width in zip(groups.items(), widths, strict=True)}
    small = remove_units(found["model"], groups, kept, found["example"]).model
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for module in small.modules():
            if hasattr(module, "reset_parameters"):
                module.reset_parameters()
    return small


def scratch_cell(setting: StructuredSetting, name: str, widths: tuple[int, ...], seed: int) -> list[Row]:
    """These widths trained from new weights by MAP, for as many epochs as training and fine-tuning together."""
    import shaver

    found = data_of(setting, name, seed)
    small = at_widths(found, widths, seed)
    epochs = setting.epochs(name) + setting.tune
    shaver.fit(small, found["train"], method="map", epochs=epochs, batch_size=EXPERIMENTS[name].batch_size, seed=seed)
    label = {"part": "scratch", "experiment": name, "training": "from scratch", "kind": "from scratch", "seed": seed}
    return [label | {"split": setting.split, "tuned": setting.tune} | measured(found, small)]


def free_cell(setting: StructuredSetting, name: str, training: str, how: str, seed: int) -> list[Row]:
    """OPD down to each FLOP target, fine-tuned; ``how`` is ``"uniform"`` or the normalisation of free widths."""
    from shaver.structure import ChoiceOptions, Chooser, remove_units

    found = prepare(setting, name, training, seed)
    groups, scores = scores_of(found, "opd", seed)
    options = {"spread": "uniform"} if how == "uniform" else {"spread": "global", "normalise": how}
    chooser = Chooser(found["model"], groups, ChoiceOptions(target="flops", **options), found["example"])
    label = {"part": "free", "experiment": name, "training": training, "kind": f"opd {how}", "seed": seed}
    rows = []
    for ratio in setting.ratios:
        chosen = chooser.choose(scores, 1 - 1 / ratio)
        small = remove_units(found["model"], groups, chosen.kept, found["example"]).model
        row = label | {"split": setting.split, "ratio": ratio}
        rows.append(row | {"tuned": 0} | measured(found, small))
        if setting.tune:
            rows.append(row | tune(setting, found, small, name, seed))
    return rows


def gradual_cell(setting: StructuredSetting, name: str, training: str, how: str, ratio: float, seed: int) -> list[Row]:
    """Units removed during training, for as many epochs as training and fine-tuning together."""
    import shaver
    from shaver.structure import Gradual, compact_with_report

    found = data_of(setting, name, seed)
    method, spam = TRAININGS[training]
    settings = parse_settings(how)
    if method == "spam":  # one string holds the settings of Gradual and of SpaM; split them by name
        own = {k: settings.pop(k) for k in list(settings) if k in ("shrink", "freeze", "burn_in", "update", "source")}
        spam = spam | own
    gradual = Gradual(1 - 1 / ratio, example=found["example"], target="flops", **settings)
    history = shaver.fit(
        found["model"],
        found["train"],
        method=method,
        epochs=setting.epochs(name) + setting.tune,
        batch_size=EXPERIMENTS[name].batch_size,
        spam=spam or None,
        seed=seed,
        online=gradual,
    )
    small = compact_with_report(found["model"], found["example"], masks=history.masks).model
    label = {"part": "gradual", "experiment": name, "training": training, "kind": f"gradual {how}".strip()}
    rest = {"seed": seed, "split": setting.split, "ratio": ratio, "tuned": setting.tune}
    return [label | rest | measured(found, small)]


def rivals_cell(setting: StructuredSetting, training: str, importance: str, everywhere: bool, seed: int) -> list[Row]:
    """torch-pruning on the same trained network, down to the same FLOPs."""
    from structured_rivals import pruned

    found = prepare(setting, SHOWCASE, training, seed)
    batch = next(iter(found["train"].batches(SAMPLES)))
    kind = f"torch-pruning {importance}{' global' if everywhere else ''}"
    label = {"part": "rivals", "experiment": SHOWCASE, "training": training, "kind": kind, "seed": seed}
    rows = []
    for ratio, small in pruned(found["model"], importance, setting.ratios, batch, everywhere=everywhere):
        row = label | {"split": setting.split, "ratio": ratio}
        rows.append(row | {"tuned": 0} | measured(found, small))
        if setting.tune:
            rows.append(row | tune(setting, found, small, SHOWCASE, seed))
    return rows


def uniform_widths(setting: StructuredSetting, name: str) -> list[tuple[int, ...]]:
    """The widths that uniform pruning leaves at the fine-tuned sparsities, and KNOWN_WIDTHS."""
    import torch

    from shaver.structure import ChoiceOptions, Chooser, find_groups

    found = data_of(setting, name, 0)
    groups = find_groups(found["model"], found["example"])
    scores = {g: torch.rand(group.units) for g, group in groups.items()}
    chooser = Chooser(found["model"], groups, ChoiceOptions())
    chosen = [chooser.choose(scores, sparsity).widths for sparsity in setting.tuned]
    widths = [tuple(after for _, after in by_group.values()) for by_group in chosen]
    return list(dict.fromkeys([*widths, *KNOWN_WIDTHS.get(name, ())]))


def add_latencies(setting: StructuredSetting, rows: list[Row]) -> None:
    """Measure the latency of each set of widths once and add it to all rows with these widths."""
    import torch

    known: dict[tuple[str, str], dict[str, float]] = {}
    for row in (row for row in rows if "widths" in row):
        key = (row["experiment"], row["widths"])
        if key not in known:
            found = data_of(setting, row["experiment"], 0)
            network = at_widths(found, tuple(map(int, key[1].split("-"))), 0).eval()
            shape = found["example"].shape[1:]
            known[key] = {
                f"latency_{size}": turns({"it": network}, torch.randn(size, *shape), 0.5)["it"][0] for size in (1, 128)
            }
        row |= known[key]


def identity(row: Row) -> tuple[Any, ...]:
    """The key of a row; a new row replaces an older one with the same key."""
    keys = ("part", "experiment", "training", "kind", "seed", "split", "sparsity", "round_to", "ratio", "tuned")
    return (*(row.get(key) for key in keys), row["widths"] if row["part"] == "scratch" else None)


def cells_of(asked: argparse.Namespace, setting: StructuredSetting) -> tuple[list[Cell], list[Cell]]:
    """The cells that train networks, and the cells that use them."""
    networks: dict[tuple[str, str, int], None] = {}
    cells: list[Cell] = []
    for name in asked.experiments:
        for seed in range(asked.seeds or EXPERIMENTS[name].seeds):
            for training in asked.trainings:
                if {"oneshot", "free"} & set(asked.parts) or ("rivals" in asked.parts and name == SHOWCASE):
                    networks[name, training, seed] = None
                if "oneshot" in asked.parts:
                    cells += [(oneshot_cell, (name, training, c, seed)) for c in asked.criteria]
                if "free" in asked.parts:
                    hows = ("uniform", "mean", "none", "price")
                    cells += [(free_cell, (name, training, how, seed)) for how in hows]
                if "gradual" in asked.parts:
                    hows = asked.gradual or ["", 'spread="global"', 'spread="global",normalise="none"']
                    cells += [
                        (gradual_cell, (name, training, how, ratio, seed)) for how in hows for ratio in setting.ratios
                    ]
                if "rivals" in asked.parts and name == SHOWCASE:
                    cells += [(rivals_cell, (training, i, e, seed)) for i in IMPORTANCES for e in (False, True)]
            if "scratch" in asked.parts:
                cells += [(scratch_cell, (name, widths, seed)) for widths in uniform_widths(setting, name)]
    return [(train_cell, network) for network in networks], cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--experiments", nargs="+", choices=list(EPOCHS), default=list(EPOCHS))
    parser.add_argument("--trainings", nargs="+", choices=list(TRAININGS), default=list(TRAININGS))
    parser.add_argument("--criteria", nargs="+", default=list(CRITERIA))
    parser.add_argument("--sparsities", nargs="+", type=float, default=list(SPARSITIES))
    parser.add_argument("--tuned", nargs="+", type=float, default=[0.6, 0.8, 0.9, 0.95], help="sparsities to fine-tune")
    parser.add_argument("--ratios", nargs="+", type=float, default=list(RATIOS), help="times fewer FLOPs")
    parser.add_argument("--gradual", action="append", default=[], help="settings of Gradual: a=1,b=2; may be repeated")
    parser.add_argument("--tune", type=int, default=5, help="epochs of fine-tuning")
    parser.add_argument("--tune-lr", type=float, default=0.02)
    parser.add_argument("--split", choices=("test", "valid"), default="test")
    parser.add_argument("--seeds", type=int, help="three if left out; five for cancer")
    parser.add_argument("--scale", type=float, default=1.0, help=f"factor on the epochs of training, {EPOCHS}")
    parser.add_argument("--batch", type=int, default=128, help="samples per call, for the part speed")
    parser.add_argument("--name", default="structured")
    parser.add_argument("--folder", type=Path, default=Path("docs/results"))
    parser.add_argument("--runs", type=Path, default=Path("runs/structured"))
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    asked = parser.parse_args()
    setting = StructuredSetting(
        split=asked.split,
        scale=asked.scale,
        runs=str(asked.runs),
        digest=digest_of(asked.split, asked.scale),
        tune=asked.tune,
        tune_lr=asked.tune_lr,
        sparsities=tuple(asked.sparsities),
        tuned=tuple(asked.tuned),
        ratios=tuple(asked.ratios),
    )
    asked.folder.mkdir(parents=True, exist_ok=True)
    path = asked.folder / f"{asked.name}.csv"
    rows = {identity(row): row for row in read(path)}
    # Two rounds, because several cells use the same trained network.
    for round_ in cells_of(asked, setting):
        for found in run_cells(setting, round_, asked.jobs):
            rows |= {identity(row): row for row in found}
            write(path, tidy(rows.values()))
    if "speed" in asked.parts:
        for network in NETWORKS:
            rows |= {identity(row): row for row in speed(network, asked.scale, asked.batch)}
            print("speed", network, flush=True)
    table = sorted(rows.values(), key=lambda row: (PARTS.index(row["part"]), row["experiment"]))
    if "latency" in asked.parts:
        add_latencies(setting, table)
    write(path, tidy(table))
    figure(table, asked.folder / f"{asked.name}.svg")
    print(summarise(table))


if __name__ == "__main__":
    main()
