"""What SpaM adds to a large model on many devices: memory and messages, computed, and measured at a small size.

    python benchmarks/scale.py                    # the table for 7 billion weights
    python benchmarks/scale.py --measure          # two processes on this machine: measured and computed values

The measurement trains a stack of linear layers with DistributedDataParallel and fully_shard, with and without SpaM.
All results are in float32 values per weight. "kept" and "sent" are counted. "first step" and "later steps" say how far
the peak memory of the process lies above the same training without SpaM. The first step also checks curvature rules.
"""

import argparse
import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed import _functional_collectives as functional

GB = 1e9
#: Llama 2 7B: all weights, and those of its largest layer.
SEVEN, LARGEST = 6_738_415_616, 32_000 * 4096


@dataclass(frozen=True)
class Cost:
    """The cost of SpaM on one rank, in float32 values per weight.

    Attributes:
        held: Kept all the time: δ and the average of H.
        measuring: Kept during a curvature measurement: squared gradients.
        message: Sent through collectives per step, on average.
    """

    held: float
    measuring: float
    message: float


def cost(ranks: int, sharded: bool, every: int = 15, update: int = 50, largest: float = 0.0) -> Cost:
    """The cost that follows from the algorithm.

    Args:
        ranks: Number of ranks, W.
        sharded: True for FSDP2, False for DistributedDataParallel.
        every: Steps between curvature measurements. Each sums one value per weight over the ranks.
        update: Steps between updates of δ. Unless sharded, the first rank sends δ to the others.
        largest: The largest layer's share of the weights. Its squares are whole before they are scattered.
    """
    if sharded:
        return Cost(2 / ranks, 1 / ranks + largest, 1 / every)
    return Cost(2, 1, 1 / every + 1 / update)


def table() -> str:
    """A Markdown table for seven billion weights, trained with Adam in bfloat16 with float32 states."""
    rows = [
        "| | ranks | weights, gradients, Adam | SpaM keeps | in a measurement | sent per step by training | by SpaM |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, ranks, sharded in (("DDP", 8, False), ("FSDP2", 8, True), ("FSDP2", 64, True)):
        part = ranks if sharded else 1
        own = SEVEN * (2 + 2 + 4 + 8) / part  # weights and gradients in half precision, a float32 copy, two moments
        spam = cost(ranks, sharded, largest=LARGEST / SEVEN)
        sent = SEVEN * (2 + 2 + 2 if sharded else 2)  # two gathers and one scatter, or one sum
        rows.append(
            f"| {name} | {ranks} | {own / GB:.1f} GB | {4 * SEVEN * spam.held / GB:.1f} GB | "
            f"{4 * SEVEN * spam.measuring / GB:.1f} GB | {sent / GB:.1f} GB | {4 * SEVEN * spam.message / GB:.2f} GB |"
        )
    return "\n".join(rows)


# The measurement ---------------------------------------------------------------------------------------------------

WIDTH, DEPTH, BATCH, EVERY, UPDATE, STEPS = 2048, 8, 16, 2, 4, 8


class Traffic:
    """Counts the float32 values that this rank gives to the collectives SpaM uses, by wrapping them."""

    def __init__(self) -> None:
        self.numbers = 0.0
        self._plain: list[tuple[Any, str, Any]] = []

    def __enter__(self) -> "Traffic":
        scatters = [name for name in ("reduce_scatter_single", "reduce_scatter_tensor") if hasattr(functional, name)]
        for home, name in ((dist, "all_reduce"), (dist, "broadcast"), (functional, scatters[0])):
            self._plain.append((home, name, getattr(home, name)))
            setattr(home, name, self._counting(getattr(home, name)))
        return self

    def _counting(self, call: Any) -> Any:
        def wrapped(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            self.numbers += tensor.numel() * tensor.element_size() / 4
            return call(tensor, *args, **kwargs)

        return wrapped

    def __exit__(self, *error: object) -> None:
        for home, name, call in self._plain:
            setattr(home, name, call)


def peak() -> float:
    """Peak memory of this process since the last call, in float32 values (Linux)."""
    status = Path("/proc/self/status").read_text()
    found = float(status.split("VmHWM:")[1].split()[0]) * 1024 / 4
    Path("/proc/self/clear_refs").write_text("5")
    return found


def measure(kind: str, with_spam: bool) -> dict[str, float]:
    """The work of one rank: train, and report the peak memory and the values sent."""
    from torch.distributed.fsdp import fully_shard

    from shaver.spam import SpaM

    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    layers = [layer for _ in range(DEPTH) for layer in (nn.Linear(WIDTH, WIDTH), nn.ReLU())]
    model: nn.Module = nn.Sequential(*layers, nn.Linear(WIDTH, 10))
    weights = sum(p.numel() for p in model.parameters())
    trained = model
    if kind == "fsdp":
        for layer in model:  # type: ignore[attr-defined]
            if isinstance(layer, nn.Linear):
                fully_shard(layer)
        trained = fully_shard(model)
    else:
        trained = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    options: dict[str, Any] = {"source": "ef", "every": EVERY, "update": UPDATE, "burn_in": 0.0}
    spam = SpaM(trained, 1000, **options) if with_spam else None
    held, first = 0, 0.0
    with Traffic() as traffic:
        for step in range(STEPS):
            generator = torch.Generator().manual_seed(2 * step + dist.get_rank())
            x = torch.randn(BATCH, WIDTH, generator=generator)
            y = torch.randint(0, 10, (BATCH,), generator=generator)
            optimizer.zero_grad()
            F.cross_entropy(trained(x), y).backward()
            if spam is None:
                optimizer.step()
            else:
                spam.step(optimizer)
            if step == 0:
                first = peak()
    if spam is not None:
        kept = [*spam.online.average.values(), *(f.values for f in spam.prior.factors)]  # type: ignore[union-attr]
        held = sum(t.numel() for t in kept)
    found = {"weights": weights, "held": held / weights, "first": first / weights, "peak": peak() / weights}
    found["message"] = traffic.numbers / weights / STEPS
    dist.barrier()
    dist.destroy_process_group()
    return found


def compare(ranks: int = 2) -> str:
    """A Markdown table of measured and computed costs."""
    lines = ["| | | kept | first step | later steps | sent per step |", "|---|---|---|---|---|---|"]
    for kind in ("ddp", "fsdp"):
        found = {with_spam: _launch(kind, with_spam, ranks) for with_spam in (False, True)}
        first, later = (found[True][key] - found[False][key] for key in ("first", "peak"))
        spam = found[True]
        expected = cost(ranks, kind == "fsdp", EVERY, UPDATE, 1 / DEPTH)
        lines.append(f"| {kind} | measured | {spam['held']:.2f} | {first:.2f} | {later:.2f} | {spam['message']:.3f} |")
        least = expected.held + expected.measuring
        lines.append(f"| | computed | {expected.held:.2f} | | {least:.2f} | {expected.message:.3f} |")
    return "\n".join(lines)


def _launch(kind: str, with_spam: bool, ranks: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}", __file__]
        command += ["--rank-of", kind, "--into", folder] + (["--spam"] if with_spam else [])
        # Return freed memory to the system at once, so that the peak counts only memory in use.
        settings = os.environ | {"OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
        subprocess.run(command, check=True, env=settings, capture_output=True, timeout=600)
        result: dict[str, float] = json.loads((Path(folder) / "0.json").read_text())
        return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--measure", action="store_true", help="train in two processes and compare with the formulas")
    parser.add_argument("--rank-of", choices=["ddp", "fsdp"], help=argparse.SUPPRESS)
    parser.add_argument("--into", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--spam", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.rank_of:
        found = measure(given.rank_of, given.spam)
        (given.into / f"{os.environ['RANK']}.json").write_text(json.dumps(found))
        return
    print(compare() if given.measure else table())


if __name__ == "__main__":
    main()
