"""How fast compact networks are: beside the same architecture built at those widths, and with widths rounded."""

import copy
import itertools
import statistics
import time
from typing import Any

Row = dict[str, Any]

#: Arguments of the zoo, and the shape of an input.
NETWORKS: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "resnet18": ({}, (3, 32, 32)),
    "vit": (
        {"image_size": 32, "channels": 3, "patch_size": 4, "dim": 256, "heads": 8, "mlp_dim": 1024, "depth": 4},
        (3, 32, 32),
    ),
}
#: For --scale below 0.2: the same code on networks that take no time.
TINY = {"resnet18": {"planes": 8}, "vit": {"dim": 64, "heads": 8, "mlp_dim": 128, "depth": 1}}
SPARSITIES = (0.5, 0.75, 0.9)
#: Where widths come out odd, and what they are rounded to.
ODD, ROUNDED = 0.6, (1, 8, 16)
#: Rounds of calls to time, even if they take long.
FEWEST = 5


def speed(name: str, scale: float, batch: int) -> list[Row]:
    """Rows of one network: dense, compact and built at the compact widths, for one sample and for a batch."""
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
    """Median seconds of a call on one thread, of the processor and on the wall, for each network.

    The networks take turns call by call, each round beginning with another, so that whatever slows the machine slows
    all of them; the processor's time does not count what others take from it.
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
                networks[kind](x)  # whoever came before has left its own weights in the caches
                began = time.thread_time(), time.perf_counter()
                networks[kind](x)
                times[kind].append((time.thread_time() - began[0], time.perf_counter() - began[1]))
    return {
        kind: (statistics.median(a for a, _ in each), statistics.median(b for _, b in each))
        for kind, each in times.items()
    }


def rebuilt(network: Any) -> Any:
    """The same architecture with every layer made by its own constructor at the present widths, weights fresh."""
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
    """Markdown: compact beside built, then what rounding buys."""
    if not rows:
        return ""
    lines = [
        "**Speed**, one thread, the networks taking turns, median milliseconds of the processor for a call. *vs "
        "built*: compact over the same architecture built at those widths. *gain*: how many times faster than dense, "
        "over how many times fewer FLOPs.\n",
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
        f"\n**round_to** at {100 * ODD:.0f} % of units: widths as multiples.\n",
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
