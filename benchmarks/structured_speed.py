"""Speed of compact networks, compared with the same architecture built at those widths, and with rounded widths."""

import copy
import itertools
import statistics
import time
from typing import Any

Row = dict[str, Any]

#: Arguments for the zoo, and the shape of an input.
NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "resnet18": ({}, (3, 32, 32)),
    "vit": (
        {"image_size": 32, "channels": 3, "patch_size": 4, "dim": 256, "heads": 8, "mlp_dim": 1024, "depth": 4},
        (3, 32, 32),
    ),
}
#: Small networks to try the code quickly, for --scale below 0.2.
TINY = {"resnet18": {"planes": 8}, "vit": {"dim": 64, "heads": 8, "mlp_dim": 128, "depth": 1}}
SPARSITIES = (0.5, 0.75, 0.9)
#: A sparsity that leaves odd widths, and the multiples to round them to.
ODD, ROUNDED = 0.6, (1, 8, 16)
#: The smallest number of timed rounds, however long they take.
FEWEST = 5


def speed(name: str, scale: float, batch: int) -> list[Row]:
    """Rows of one network (dense, compact, and built at the compact widths) for one sample and for a batch."""
    import torch

    import shaver
    from shaver.structure import compact_with_report, find_groups

    torch.set_num_threads(1)
    arguments, shape = NETWORKS[name]
    if scale < 0.2:
        arguments = arguments | TINY[name]
    model = shaver.zoo.build(name, seed=0, **arguments).eval()
    x = torch.randn(2, *shape, generator=torch.Generator().manual_seed(0))
    groups = find_groups(model, x, residual=True)
    rows = []
    for sparsity, round_to in [(s, 1) for s in SPARSITIES] + [(ODD, r) for r in ROUNDED]:
        report = compact_with_report(
            model, x, criterion="magnitude", sparsity=sparsity, round_to=round_to, groups=groups
        )
        networks = {"dense": model, "compact": report.model, "built": rebuilt(report.model)}
        for network in networks.values():
            network.eval()
        row: Row = {"part": "speed", "experiment": name, "sparsity": sparsity, "round_to": round_to}
        row |= {"flops_dense": report.before.flops, "flops": report.after.flops, "parameters": report.after.parameters}
        for size, label in ((1, "one"), (batch, "many")):
            for kind, (own, wall) in turns(networks, torch.randn(size, *shape), 2.0 * min(scale, 1.0)).items():
                row |= {f"{kind}_{label}": own, f"{kind}_{label}_wall": wall}
        rows.append(row | {"batch": batch})
    return rows


def turns(networks: dict[str, Any], x: Any, seconds: float) -> dict[str, tuple[float, float]]:
    """Median processor time and wall time per call in seconds, for each network, on one thread.

    The networks take turns call by call, and each round begins with another one, so a slow moment of the machine
    affects all of them. Processor time leaves out the time that other programs take.
    """
    import torch

    times: dict[str, list[tuple[float, float]]] = {kind: [] for kind in networks}
    kinds = list(networks)
    with torch.inference_mode():
        for network in networks.values():
            network(x)
        end = time.perf_counter() + seconds
        for number in itertools.count():
            if number >= FEWEST and time.perf_counter() > end:
                break
            for kind in kinds[number % len(kinds) :] + kinds[: number % len(kinds)]:
                networks[kind](x)  # warm-up: the caches hold the weights of the previous network
                began = time.thread_time(), time.perf_counter()
                networks[kind](x)
                times[kind].append((time.thread_time() - began[0], time.perf_counter() - began[1]))
    return {
        kind: (statistics.median(a for a, _ in each), statistics.median(b for _, b in each))
        for kind, each in times.items()
    }


def rebuilt(network: Any) -> Any:
    """The same architecture with new weights, every layer built by its own constructor at the present widths."""
    from torch import nn

    fresh = copy.deepcopy(network)
    for module in list(fresh.modules()):
        for child_name, child in list(module.named_children()):
            made = None
            if isinstance(child, nn.Conv2d):
                made = nn.Conv2d(
                    child.weight.shape[1] * child.groups, child.weight.shape[0], child.kernel_size, child.stride,
                    child.padding, child.dilation, child.groups, bias=child.bias is not None,
                )  # fmt: skip
            elif isinstance(child, nn.Linear):
                made = nn.Linear(child.weight.shape[1], child.weight.shape[0], bias=child.bias is not None)
            elif isinstance(child, nn.BatchNorm2d):
                made = nn.BatchNorm2d(len(child.weight))
            elif isinstance(child, nn.LayerNorm):
                made = nn.LayerNorm(child.weight.shape)
            if made is not None:
                setattr(module, child_name, made)
    return fresh.eval()


def speed_tables(rows: list[Row]) -> str:
    """Markdown tables: compact and built networks, then the effect of rounding."""
    if not rows:
        return ""
    lines = [
        "**Speed** on one thread, with the networks taking turns: median milliseconds of processor time per call. *vs "
        "built*: compact divided by the same architecture built at those widths. *gain / FLOP gain*: the speed-up over "
        "dense divided by the reduction in FLOPs.\n",
        "| network | removed | FLOPs ÷ | batch | dense | compact | built | vs built | faster × | gain / FLOP gain |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for row in (r for r in rows if int(r["round_to"]) == 1 and float(r["sparsity"]) in SPARSITIES):
        for size, kind in ((1, "one"), (row["batch"], "many")):
            dense, compact, built = (float(row[f"{k}_{kind}"]) for k in ("dense", "compact", "built"))
            fewer = float(row["flops_dense"]) / float(row["flops"])
            lines.append(
                f"| {row['experiment']} | {100 * float(row['sparsity']):.0f} % | {fewer:.2f} | {size} | "
                f"{1000 * dense:.2f} | {1000 * compact:.2f} | {1000 * built:.2f} | {compact / built:.3f} | "
                f"{dense / compact:.2f} | {dense / compact / fewer:.2f} |"
            )
    lines += [
        f"\n**round_to**: widths as multiples, with {100 * ODD:.0f} % of the units removed.\n",
        "| network | round_to | FLOPs ÷ | batch | compact | faster × | gain / FLOP gain |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in (r for r in rows if float(r["sparsity"]) == ODD):
        dense, compact = (float(row[f"{k}_many"]) for k in ("dense", "compact"))
        fewer = float(row["flops_dense"]) / float(row["flops"])
        lines.append(
            f"| {row['experiment']} | {row['round_to']} | {fewer:.2f} | {row['batch']} | {1000 * compact:.2f} | "
            f"{dense / compact:.2f} | {dense / compact / fewer:.2f} |"
        )
    return "\n".join(lines) + "\n"
