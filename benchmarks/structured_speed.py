"""How fast compact networks are: beside the same architecture built at those widths, and with widths rounded."""

import copy
import statistics
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
ODD, ROUNDED = 0.6, (1, 4, 8, 16)


def speed(name: str, scale: float) -> list[Row]:
    """Rows of one network: dense, compact and built at the compact widths, taking turns, in one thread."""
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
    batches, rounds = ((1, 128), 7) if scale >= 0.2 else ((1, 8), 3)
    rows = []
    for sparsity, round_to in [(s, 1) for s in SPARSITIES] + [(ODD, r) for r in ROUNDED]:
        report = compact_with_report(
            model, x, criterion="magnitude", sparsity=sparsity, round_to=round_to, groups=groups
        )
        networks = {"dense": model, "compact": report.model, "built": rebuilt(report.model)}
        row: Row = {"part": "speed", "experiment": name, "sparsity": sparsity, "round_to": round_to}
        row |= {"flops_dense": report.before.flops, "flops": report.after.flops, "parameters": report.after.parameters}
        for size in batches:
            times = turns(networks, torch.randn(size, *shape), rounds)
            row |= {f"{kind}_{'one' if size == 1 else 'many'}": value for kind, value in times.items()}
        rows.append(row | {"batch": batches[1]})
    return rows


def turns(networks: dict[str, Any], x: Any, rounds: int) -> dict[str, float]:
    """Median seconds of a call; the networks take turns, so that whatever slows the machine slows all of them."""
    from shaver.measure import latency

    times: dict[str, list[float]] = {kind: [] for kind in networks}
    for _ in range(rounds):
        for kind, network in networks.items():
            times[kind].append(latency(network, x, batch_size=len(x), repeats=5, seconds=1.0).median)
    return {kind: statistics.median(values) for kind, values in times.items()}


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
        "**Speed**, one thread, the networks taking turns, median milliseconds of a call. *vs built*: compact over the "
        "same architecture built at those widths. *gain*: how many times faster than dense, over how many times fewer "
        "FLOPs.\n",
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
