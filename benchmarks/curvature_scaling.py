"""Draws how the cost of an estimate grows with batch size, width, classes and positions.

    python benchmarks/curvature_scaling.py --repeats 5

Each panel varies one size. It shows the time of one estimate divided by that of forward and backward passes on the same
four batches. Both are medians over repeats in turn, on random data and one thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver import curvature

KINDS = [("diag", "ef"), ("diag", "mc"), ("diag", "ggn"), ("kron", "ef"), ("kron", "ggn")]


@dataclass(frozen=True)
class Setting:
    """One point of the figure: the sizes of a network and its batch."""

    batch: int = 128
    width: int = 32
    classes: int = 10
    positions: int = 64

    def build(self) -> tuple[nn.Module, Tensor, Tensor]:
        """Three linear layers, two of them shared over positions, as in a mixer or the MLP of an encoder."""
        torch.manual_seed(0)
        model = nn.Sequential(
            *(nn.Linear(self.width, self.width), nn.ReLU(), nn.Linear(self.width, self.width), nn.ReLU()),
            *(Pool(), nn.Linear(self.width, self.classes)),
        )
        x = torch.randn(self.batch, self.positions, self.width)
        return model, x, torch.randint(self.classes, (self.batch,))


class Pool(nn.Module):
    """The mean over positions."""

    def forward(self, x: Tensor) -> Tensor:
        """``(batch, positions, width)`` to ``(batch, width)``."""
        return x.mean(1)


#: Batches per estimate, so that choosing the rules, once per estimate, weighs as little as in real use.
BATCHES = 4

PANELS = {
    "batch": [8, 32, 128, 512],
    "width": [16, 32, 64, 128, 256],
    "classes": [2, 10, 30, 100],
    "positions": [1, 4, 16, 64, 256],
}


def training_passes(model: nn.Module, batches: list[tuple[Tensor, Tensor]]) -> None:
    for x, y in batches:
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()


def ratios(setting: Setting, repeats: int) -> list[float]:
    """Median time of each kind of estimate, divided by the median time of the training passes."""
    model, x, y = setting.build()
    batches = [(x, y)] * BATCHES
    jobs: list[Callable[[], object]] = [lambda: training_passes(model, batches)]
    for structure, source in KINDS:
        jobs.append(
            lambda s=structure, k=source: curvature.estimate(model, batches, structure=s, source=k)  # type: ignore[misc]
        )
    times: list[list[float]] = [[] for _ in jobs]
    for repeat in range(repeats + 1):
        for job, taken in zip(jobs, times, strict=True):
            start = time.process_time()
            job()
            if repeat:  # the first round warms up
                taken.append(time.process_time() - start)
    epoch, *others = (statistics.median(taken) for taken in times)
    return [other / epoch for other in others]


def draw(path: Path, repeats: int) -> None:
    """Measure every panel and write the figure."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(1, len(PANELS), figsize=(13, 3.4), sharey=True, layout="constrained")
    for axis, (name, values) in zip(axes, PANELS.items(), strict=True):
        points = [ratios(Setting(**{name: value}), repeats) for value in values]
        for index, (structure, source) in enumerate(KINDS):
            label = f"{'KFAC' if structure == 'kron' else 'diagonal'} {source.upper()}"
            style = "--" if structure == "kron" else "-"
            axis.plot(values, [point[index] for point in points], style, marker="o", markersize=3.5, label=label)
        axis.set(xlabel=name, xscale="log", yscale="log")
        axis.set_xticks(values, [str(value) for value in values])
        axis.minorticks_off()
        axis.grid(alpha=0.3)
    base = Setting()
    fixed = ", ".join(f"{name} {getattr(base, name)}" for name in PANELS)
    axes[0].set_ylabel("time ÷ forward + backward pass")
    axes[-1].legend(fontsize="small")
    figure.suptitle(f"One curvature estimate; sizes not varied: {fixed}", fontsize="medium")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path)
    plt.close(figure)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5)
    default = Path(__file__).parents[1] / "docs" / "results" / "curvature_scaling.svg"
    parser.add_argument("--path", type=Path, default=default)
    options = parser.parse_args()
    torch.set_num_threads(1)
    draw(options.path, options.repeats)
