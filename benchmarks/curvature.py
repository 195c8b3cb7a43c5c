"""What one curvature estimate costs here and in other libraries, as a multiple of one MAP epoch on the same inputs.

    python benchmarks/curvature.py                          # every network, default sizes, into runs/curvature
    python benchmarks/curvature.py --nets lenet --images 60000 --repeats 5
    python benchmarks/curvature.py --scaling                # also draws how the cost grows

The benchmark uses one process, one thread and processor time, which other programs disturb less than wall time. A MAP
epoch is ordinary training: forward pass, backward pass and SGD step at batch size 128. Methods take turns: each repeat
runs every method once and divides its time by that of the repeat's MAP epoch. The median ratio is shown. Online rows
compare measured steps with plain steps that alternate with them. Inputs and labels are random; the cost does not depend
on them. Memory is the rise of the peak resident set (``getrusage``) over one batch in a forked child, so it includes
what kernels allocate outside torch.
"""

import argparse
import csv
import platform
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.nn.functional as F
from curvature_memory import measure, one_line
from curvature_nets import NETS, Net
from curvature_peers import PEERS, Batches, load
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from shaver import curvature

BATCH = 128
KINDS = [("diag", "ef"), ("diag", "mc"), ("diag", "ggn"), ("kron", "ef"), ("kron", "mc"), ("kron", "ggn")]
OURS, MAP = "shaver", "MAP epoch"


@dataclass
class Row:
    """One method on one network.

    Attributes:
        run: Makes one pass over the given batches and returns the number of parameters it covers.
        ratios: Its time divided by the MAP epoch's, one per repeat.
        memory: Peak extra bytes for one batch.
        note: Why there is no number, or what the number does not cover.
    """

    net: str
    library: str
    structure: str
    source: str
    run: Callable[[Batches], int]
    ratios: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    memory: float = float("nan")
    note: str = ""

    @property
    def ratio(self) -> float:
        """The median over repeats, or NaN."""
        return statistics.median(self.ratios) if self.ratios else float("nan")


class Trainer:
    """MAP epochs of one network; with ``every``, the curvature is measured online on every such step.

    The check of the rules in the first step happens during the warm-up.
    """

    def __init__(self, net: Net, every: int | None = None, source: str = "ef") -> None:
        self.net, self.every, self.source = net, every, source
        self.model: torch.nn.Module | None = None

    def __call__(self, batches: Batches) -> int:
        """Train on the batches; returns the number of parameters."""
        for x, y in batches:
            self.step(x, y)
        assert self.model is not None
        return sum(p.numel() for p in self.model.parameters())

    def step(self, x: torch.Tensor, y: torch.Tensor) -> float:
        """Seconds of processor time for one step."""
        if self.model is None:
            self.model = self.net.build().train()
            self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-4, momentum=0.9)
            self.online = None
            if self.every:
                self.online = curvature.OnlineCurvature(self.model, 60000, source=self.source, every=self.every)
        began = time.process_time()
        self.optimizer.zero_grad()
        loss = F.cross_entropy(self.model(x), y)
        with self.online.measure() if self.online else nullcontext():
            loss.backward()
        self.optimizer.step()
        return time.process_time() - began

    def ratios_over(self, plain: "Trainer", batches: Batches) -> list[float]:
        """Its time divided by that of plain steps taken in turn, one ratio per round of ``every`` steps."""
        assert self.every
        pairs = [(self.step(x, y), plain.step(x, y)) for x, y in batches]
        rounds = [pairs[i : i + self.every] for i in range(0, len(pairs) - self.every + 1, self.every)]
        return [sum(own for own, _ in part) / sum(other for _, other in part) for part in rounds]


def ours(net: Net, batches: Batches, structure: str, source: str) -> int:
    model = net.build()
    pairs = zip(batches[::2], batches[1::2], strict=False)  # estimates are fastest with batches of 256
    larger = [(torch.cat([a[0], b[0]]), torch.cat([a[1], b[1]])) for a, b in pairs] + batches[len(batches) // 2 * 2 :]
    result = curvature.estimate(model, larger, structure=structure, source=source)
    return sum(block.shape.numel() for _, block in result)


def rows_of(name: str, libraries: list[str]) -> list[Row]:
    """The rows: MAP first, then ours, ours online, and the peers."""
    net = NETS[name]
    rows = [Row(name, MAP, "", "", Trainer(net))]
    for structure, source in KINDS:
        rows.append(
            Row(name, OURS, structure, source, lambda b, s=structure, k=source: ours(net, b, s, k))  # type: ignore[misc]
        )
    for source, every in [("ef", 4), ("ef", 10), ("mc", 4)]:
        rows.append(Row(name, f"{OURS} online, every {every}th step", "diag", source, Trainer(net, every, source)))
    for library in libraries:
        for structure, source in KINDS:
            run = lambda b, p=PEERS[library], s=structure, k=source: p(net.build(), b, s, k)  # noqa: E731
            rows.append(Row(name, library, structure, source, run))
    return rows


def probe(row: Row, batches: Batches, seconds: float, memory: int) -> None:
    """Run one batch in a forked child: memory, coverage, and whether the method works on this network."""
    first = batches[:1]
    result = measure(lambda: row.run(first), seconds=seconds, limit=memory)
    row.memory, row.note = result.memory, result.error
    total = sum(p.numel() for p in NETS[row.net].build().parameters())
    if not row.note and result.value < total:
        row.note = f"leaves out {total - result.value:,} of {total:,} parameters"
    if not result.error and row.library != MAP and result.seconds * len(batches) > seconds:
        row.note = f"not timed: one batch took {result.seconds:.0f} s" + (f"; {row.note}" if row.note else "")
        row.run = _skip
    if result.error:
        row.run = _skip


def _skip(batches: Batches) -> int:
    raise RuntimeError("skipped")


def time_rows(rows: list[Row], batches: Batches, repeats: int, advance: Callable[[], None]) -> None:
    """Each repeat runs every method once, MAP first; online rows alternate with MAP step by step."""
    for repeat in range(repeats + 1):
        epoch = 0.0
        for row in [row for row in rows if row.run is not _skip]:
            start = time.process_time()
            online = isinstance(row.run, Trainer) and row.run.every
            try:
                row.run(batches[:1] if not repeat or online else batches)  # the first round warms up
            except Exception as problem:
                if row.library == MAP:
                    raise
                row.run, row.note = _skip, one_line(problem)
                continue
            elapsed = time.process_time() - start
            epoch = elapsed if row.library == MAP else epoch
            if repeat and isinstance(row.run, Trainer) and online:
                assert isinstance(rows[0].run, Trainer)
                row.ratios += row.run.ratios_over(rows[0].run, batches)
                advance()
            elif repeat:
                row.seconds.append(elapsed)
                row.ratios.append(elapsed / epoch)
                advance()


def online_fits(row: Row, steps: int) -> bool:
    """Whether there are enough steps for an online row."""
    words = row.library.split("every ")
    return len(words) == 1 or steps >= 2 * int(words[1].split("th")[0])


def best_peer(row: Row, rows: list[Row]) -> float:
    """The best peer's time divided by ours, for our own rows; NaN for others."""
    rivals = [r.ratio for r in rows if r.library in PEERS and (r.structure, r.source) == (row.structure, row.source)]
    rivals = [ratio for ratio in rivals if ratio == ratio]
    return min(rivals) / row.ratio if rivals and row.library == OURS and row.ratios else float("nan")


def cells(row: Row, rows: list[Row]) -> list[str]:
    """The row as text: method, H, ratio, memory, lead over the best peer, note."""
    ratio = f"{row.ratio:.2f}" if row.ratios else "–"
    if "online" in row.library and row.ratios:
        ratio = f"{100 * (row.ratio - 1):+.1f} %"
    lead = best_peer(row, rows)
    kind = f"{'KFAC' if row.structure == 'kron' else 'diagonal'} {row.source.upper()}" if row.structure else ""
    memory = f"{row.memory / 2**20:.0f}" if row.memory == row.memory else "–"
    return [row.library, kind, ratio, memory, f"{lead:.1f}×" if lead == lead else "", row.note]


HEAD = ["method", "H", "time ÷ MAP epoch", "extra MiB", "lead over best peer", "note"]


def show(console: Console, net: Net, rows: list[Row], images: int) -> None:
    table = Table(title=f"{net.title} · {images} random inputs", title_justify="left")
    for title in HEAD:
        table.add_column(title, justify="right" if "÷" in title or "MiB" in title or "lead" in title else "left")
    for row in rows:
        table.add_row(*cells(row, rows), style="bold" if row.library.startswith(OURS) else None)
    console.print(table)


def write(results: list[tuple[Net, int, list[Row]]], repeats: int, folder: Path) -> None:
    """``curvature.md`` with Markdown tables and ``curvature.csv`` with every number."""
    folder.mkdir(parents=True, exist_ok=True)
    machine = f"torch {torch.__version__}, one thread, {platform.machine()}, Python {platform.python_version()}"
    lines = ["# What one curvature estimate costs", "", (__doc__ or "").split("\n\n")[2].replace("\n", " "), ""]
    lines += [f"Median of {repeats} on {machine}. The note explains a dash.", ""]
    with (folder / "curvature.csv").open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(
            ["net", "images", "library", "structure", "source", "ratio", "seconds", "extra_bytes", "ahead", "note"]
        )
        for net, images, rows in results:
            lines += [f"## {net.title}", "", f"{images} random inputs, batch {BATCH}.", ""]
            lines += ["| " + " | ".join(HEAD) + " |", "|---|---|--:|--:|--:|---|"]
            for row in rows:
                lines.append("| " + " | ".join(text.replace("|", "/") for text in cells(row, rows)) + " |")
                seconds = statistics.median(row.seconds) if row.seconds else float("nan")
                ahead = best_peer(row, rows)
                numbers = [f"{v:.6g}" if v == v else "" for v in (row.ratio, seconds, row.memory, ahead)]
                writer.writerow([row.net, images, row.library, row.structure, row.source, *numbers, row.note])
            lines.append("")
    if (folder / "curvature_scaling.svg").exists():
        lines += [
            "## How the cost grows",
            "",
            "![cost over batch, width, classes and positions](curvature_scaling.svg)",
        ]
    (folder / "curvature.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nets", nargs="+", choices=NETS, default=list(NETS))
    parser.add_argument("--images", type=int, help="number of inputs; by default fewer for larger networks")
    parser.add_argument("--repeats", type=int, default=3, help="methods take turns; the median is shown")
    parser.add_argument("--peers", nargs="*", choices=PEERS, default=list(PEERS))
    parser.add_argument("--structures", nargs="+", choices=("diag", "kron"), default=["diag", "kron"])
    parser.add_argument("--seconds", type=float, default=300, help="a method that would take longer is not timed")
    parser.add_argument("--memory", type=float, default=12, help="GiB that a method may use before it counts as failed")
    parser.add_argument("--scaling", action="store_true", help="also draw curvature_scaling.svg")
    parser.add_argument("--folder", type=Path, default=Path("runs/curvature"), help="for the tables and the figure")
    options = parser.parse_args()
    torch.set_num_threads(1)
    load(options.peers)
    console = Console(width=None if sys.stdout.isatty() else 180)  # wide enough for the notes in a file
    results = []
    for name in options.nets:
        net = NETS[name]
        images = options.images or net.images
        x, y = net.data(images)
        batches = list(zip(x.split(BATCH), y.split(BATCH), strict=True))
        rows = [row for row in rows_of(name, options.peers) if online_fits(row, len(batches))]
        rows = [row for row in rows if row.structure in ("", *options.structures)]
        with Progress(console=console, transient=True) as progress:
            task = progress.add_task(f"{net.title}: one batch each, in a forked child", total=len(rows))
            for row in rows:  # before timing, and before the first backward pass of this process
                probe(row, batches, options.seconds, int(options.memory * 2**30))
                progress.advance(task)
            alive = sum(row.run is not _skip for row in rows)
            progress.update(task, description=f"{net.title}: timing", total=alive * options.repeats, completed=0)
            time_rows(rows, batches, options.repeats, lambda p=progress, t=task: p.advance(t))  # type: ignore[misc]
        show(console, net, rows, images)
        results.append((net, images, rows))
        write(results, options.repeats, options.folder)  # after each network, so an interrupted run keeps its rows
    if options.scaling:
        from curvature_scaling import draw

        draw(options.folder / "curvature_scaling.svg", options.repeats)
        write(results, options.repeats, options.folder)
    console.print(f"written: {options.folder / 'curvature.md'} and .csv")


if __name__ == "__main__":
    sys.exit(main())
