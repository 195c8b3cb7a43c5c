"""Both sides of each threshold in ``shaver/curvature/kernels.py``: the time of one way over that of the other.

    python benchmarks/kernels.py                 # all
    python benchmarks/kernels.py grouped outer   # some

One thread, processor time, the minimum of several interleaved runs. A ratio above 1 says that the first way named in
the title is the slower one there.
"""

import argparse
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from shaver.curvature import Outer, kernels
from shaver.curvature.rules import convolution

Case = tuple[str, Callable[[], object], Callable[[], object]]


def seconds(ways: tuple[Callable[[], object], Callable[[], object]], repeats: int = 7) -> tuple[float, float]:
    """The least processor time of each, taken in turns."""
    best = [float("inf")] * 2
    for _ in range(repeats):
        for place, way in enumerate(ways):
            began = time.process_time()
            way()
            best[place] = min(best[place], time.process_time() - began)
    return best[0], best[1]


def use_of(channels: int, out: int, size: int, kernel: int = 3, columns: int = 1, samples: int = 64) -> Outer:
    """The weight's use in a convolution of random images."""
    layer = nn.Conv2d(channels, out, kernel, padding=kernel // 2)
    use = convolution(layer, torch.randn(samples, channels, size, size), torch.randn(columns, samples, out, size, size))
    assert isinstance(use["weight"], Outer)
    return use["weight"]


def tile() -> Iterator[Case]:
    """A tile of 4 MiB against a sixteenth and sixteen times of it."""
    for name, share in (("256 KiB", 1 / 16), ("64 MiB", 16)):
        use = replace(use_of(16, 16, 16, samples=256), kernel=None)

        def other(use: Outer = use, share: float = share) -> Tensor:
            kept, kernels.TILE = kernels.TILE, int(kernels.TILE * share)
            try:
                return use.square_sum()
            finally:
                kernels.TILE = kept

        yield name, other, use.square_sum


def grouped() -> Iterator[Case]:
    """Patches against a convolution grouped by samples."""
    for channels, out, size in ((4, 4, 16), (8, 8, 16), (16, 32, 16), (64, 64, 8), (128, 128, 4), (128, 160, 4)):
        kept = kernels.GROUPED_CHANNELS, kernels.GROUPED_WEIGHTS
        kernels.GROUPED_CHANNELS, kernels.GROUPED_WEIGHTS = 1, 10**9
        use = use_of(channels, out, size)
        kernels.GROUPED_CHANNELS, kernels.GROUPED_WEIGHTS = kept
        yield (
            f"{channels} → {out} channels, {9 * channels * out:,} weights",
            replace(use, kernel=None).square_sum,
            use.square_sum,
        )


def shifted() -> Iterator[Case]:
    """Patches against rows that are shifted."""
    for channels, out, kernel, columns in ((1, 6, 5, 1), (1, 6, 5, 9), (1, 16, 3, 1), (6, 6, 3, 9), (6, 16, 3, 9)):
        kept, kernels.GROUPED_CHANNELS = kernels.GROUPED_CHANNELS, 10**9
        use = use_of(channels, out, 16, kernel, columns)
        kernels.GROUPED_CHANNELS = kept
        assert use.kernel is not None
        always = replace(use, kernel=replace(use.kernel, up_to=float("inf")))
        name = f"{channels * kernel} inputs per row, {columns * out} products"
        yield name, replace(use, kernel=None).square_sum, always.square_sum


def outer() -> Iterator[Case]:
    """Σ v vᵀ as one matrix against a batched product (small) or sample by sample (many positions)."""
    for size, positions in ((16, 64), (64, 256), (127, 256), (129, 256), (256, 1024)):
        values = torch.randn(64, size, positions)

        def one(values: Tensor = values) -> Tensor:
            flat = values.transpose(0, 1).flatten(1)
            return flat @ flat.t()

        yield f"{size} × {positions}", one, lambda values=values: kernels.outer_sum(values, 1)


PARTS = {part.__name__: part for part in (tile, grouped, shifted, outer)}


def main() -> None:
    """Print one table per threshold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parts", nargs="*", choices=[*PARTS, []], help="which thresholds; default all")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    console = Console()
    for name in parser.parse_args().parts or PARTS:
        table = Table("case", "first, ms", "second, ms", "ratio", title=f"{name}: {PARTS[name].__doc__}")
        for case, *ways in PARTS[name]():
            first, second = seconds((ways[0], ways[1]))
            table.add_row(case, f"{first * 1e3:.2f}", f"{second * 1e3:.2f}", f"{first / second:.2f}")
        console.print(table)


if __name__ == "__main__":
    main()
