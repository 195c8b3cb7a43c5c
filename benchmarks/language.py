"""Memory and time per training step at the size of GPT-2: MAP and SpaM, each in its own process.

    python benchmarks/language.py                        # 8 × 256 tokens; prints a Markdown table
    python benchmarks/language.py --batch 4 --tokens 128

Accuracy, smaller widths and latency of language models are recipes: ``shaver run minilm-imdb``.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time

os.environ["HF_HUB_OFFLINE"] = "1"


def child(source: str, batch: int, length: int, steps: int) -> dict[str, float]:
    """Peak resident memory and seconds per step of AdamW on a causal GPT-2 with 124 M random weights."""
    import resource

    import torch
    import transformers

    import shaver

    torch.set_num_threads(1)
    # the tanh form of GELU in one kernel: the same function as the default's eight kernels, but one stored activation
    config = transformers.GPT2Config(activation_function="gelu_pytorch_tanh", attn_pdrop=0.0)
    model = transformers.GPT2LMHeadModel(config)
    weights = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, weight_decay=0.0, foreach=False)
    spam = None
    if source != "map":
        spam = shaver.SpaM(model, 25000, source=source, every=1, update=2, burn_in=0.0)
    generator = torch.Generator().manual_seed(0)
    times = []
    for _ in range(steps):
        ids = torch.randint(50257, (batch, length), generator=generator)
        began = time.perf_counter()
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step() if spam is None else spam.step(optimizer)
        optimizer.zero_grad()
        times.append(time.perf_counter() - began)
    peak = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return {"weights": weights, "peak": peak, "seconds": statistics.median(times), "first": times[0]}


def table(batch: int, length: int, steps: int) -> str:
    """A Markdown table of MAP, SpaM with EF and SpaM with MC, each measured in its own process."""
    lines = [
        "| training | peak memory (GiB) | beyond MAP (float32 values per weight) | seconds per step | first step |",
        "|---|--:|--:|--:|--:|",
    ]
    least = 0.0
    for source in ("map", "ef", "mc"):
        command = [sys.executable, __file__, "--child", source, str(batch), str(length), str(steps)]
        found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()[-1])
        least = least or found["peak"]
        extra = (found["peak"] - least) / 4 / found["weights"]
        name = "MAP" if source == "map" else f"SpaM, {source.upper()}"
        lines.append(
            f"| {name} | {found['peak'] / 2**30:.2f} | {extra:.2f} | {found['seconds']:.1f} | {found['first']:.1f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        print(json.dumps(child(sys.argv[2], *map(int, sys.argv[3:6]))))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=8, help="samples per step")
    parser.add_argument("--tokens", type=int, default=256, help="tokens per sample")
    parser.add_argument("--steps", type=int, default=3)
    asked = parser.parse_args()
    print(table(asked.batch, asked.tokens, asked.steps))


if __name__ == "__main__":
    main()
