"""What unstructured sparsity gains: smaller files, faster CPU inference, and the cost of scoring and masking.

    python benchmarks/sparse.py         # about half a minute on one thread

Every line compares with the dense network in the same run and prints the ratio and the aim.
"""

import tempfile
import time
from pathlib import Path
from statistics import median

import torch
from torch import nn

from shaver import zoo
from shaver.criteria import score
from shaver.curvature import Curvature, DiagonalBlock
from shaver.evidence import Posterior
from shaver.files import load, save
from shaver.io import save_tensors
from shaver.pruning import Ranking, prune, sparse_inference

LEVELS = [0.2, 0.4, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99]


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    files()
    inference()
    scoring()


def files() -> None:
    print("files: dense float32 bytes / bytes of the folder, every bit restored")
    for name, factory in [("lenet", zoo.LeNet), ("fcn", zoo.FCN), ("wrn16", zoo.WRN16)]:
        for sparsity, aim in ((0.95, 8), (0.99, 25)):
            model = factory()
            prune(model, score(model, "random"), sparsity)
            with tempfile.TemporaryDirectory() as folder:
                save_tensors(Path(folder) / "dense" / "dense.safetensors", model.state_dict())
                save(model, Path(folder) / "sparse")
                dense, sparse = (
                    sum(file.stat().st_size for file in (Path(folder) / kind).iterdir()) for kind in ("dense", "sparse")
                )
                same = load(Path(folder) / "sparse", factory).state_dict()
                exact = all(torch.equal(tensor, same[key]) for key, tensor in model.state_dict().items())
            ratio = f"{dense:>9} / {sparse:>7} = {dense / sparse:5.1f}x (aim {aim}x)"
            print(f"  {name:6} {sparsity:.2f}  {ratio}, exact: {exact}")


def inference() -> None:
    print("inference: 784-4096-4096-10, one thread, dense / sparse seconds (aim 5x at 0.99)")
    for sparsity in (0.9, 0.95, 0.99):
        model = nn.Sequential(
            *(nn.Linear(784, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 10)),
        )
        prune(model, score(model, "random"), sparsity)
        for batch in (1, 64, 512):
            x = torch.randn(batch, 784)
            result = sparse_inference(model, x, repeats=5)
            with torch.no_grad():
                off = float((model(x) - result.model(x)).abs().max())
            swapped = sum(layer.swapped for layer in result.layers)
            times = f"{result.dense_seconds * 1e3:.2f} / {result.sparse_seconds * 1e3:.2f} ms = {result.speedup:5.1f}x"
            print(f"  {sparsity:.2f} batch {batch:>3}: {times}, {swapped} of 3 layers swapped, off by {off:.1g}")


def scoring() -> None:
    model = zoo.ResNet18Fixup()
    parameters = dict(model.named_parameters())
    blocks = {name: DiagonalBlock(torch.rand_like(p)) for name, p in parameters.items()}
    posterior = Posterior(Curvature(blocks, -1.0, 1, "diag", "ggn"), 1.0, parameters)

    def run(criterion: str) -> tuple[float, float]:
        start = time.perf_counter()
        scores = score(model, criterion, posterior=posterior)
        scored = time.perf_counter()
        list(map(Ranking(scores).at, LEVELS))
        return scored - start, time.perf_counter() - scored

    times = {criterion: [run(criterion) for _ in range(5)] for criterion in ("magnitude", "opd")}
    total = sum(p.numel() for p in parameters.values())
    print(f"scoring and masking {total} parameters at {len(LEVELS)} levels (aim 3 s)")
    for criterion, runs in times.items():
        scoring_time, masking = (median(values) for values in zip(*runs, strict=True))
        print(f"  {criterion:9} {scoring_time:.2f} s + {masking:.2f} s = {scoring_time + masking:.2f} s")


if __name__ == "__main__":
    main()
