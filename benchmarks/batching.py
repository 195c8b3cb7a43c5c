"""What batching costs: one epoch of MNIST batches, as a share of one MAP epoch of LeNet on the same batches.

    python benchmarks/batching.py [--repeats 5] [--batch-size 128]

The aim is below 5 %. MAP is ordinary training with weight decay. MNIST is read from SHAVER_DATA or the cache. Without
it, random images of its size are used; the time does not depend on the pixels. A torch DataLoader over the same tensors
is timed for comparison. Everything uses one torch thread.
"""

import argparse
import statistics
import time
from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.data import DataLoader

from shaver.data import FlipCrop, InMemory, load
from shaver.zoo import build


def mnist() -> tuple[InMemory, str]:
    try:
        return load("mnist", download=False).train, "MNIST"
    except FileNotFoundError:
        generator = torch.Generator().manual_seed(0)
        images = torch.randint(0, 256, (60000, 1, 28, 28), dtype=torch.uint8, generator=generator)
        labels = torch.randint(0, 10, (60000,), generator=generator)
        return InMemory(images, labels, mean=0.5, std=0.3), "random images of MNIST's size (MNIST was not found)"


def seconds(work: Callable[[], None]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def walk(batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    for _ in batches:
        pass


def train(model: torch.nn.Module, batches: Iterable[tuple[Tensor, Tensor]]) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.03, momentum=0.9)
    for x, y in batches:
        loss = F.cross_entropy(model(x), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=5, help="epochs of batching; the median is shown")
    parser.add_argument("--batch-size", type=int, default=128)
    options = parser.parse_args()
    torch.set_num_threads(1)
    data, source = mnist()
    print(f"{source}: {len(data)} images, batch size {options.batch_size}, one thread")
    batches = data.batches(options.batch_size, shuffle=True)
    walk(batches)  # warm-up
    batching = statistics.median(seconds(lambda: walk(batches)) for _ in range(options.repeats))
    shifted = InMemory(data.inputs, data.targets, mean=data.mean, std=data.std, augment=FlipCrop(pad=2, flip=False))
    augmented = shifted.batches(options.batch_size, shuffle=True)
    augmenting = statistics.median(seconds(lambda: walk(augmented)) for _ in range(options.repeats))
    loader = seconds(lambda: walk(DataLoader(data, batch_size=options.batch_size, shuffle=True)))
    model = build("lenet")
    train(model, list(batches)[:20])  # warm-up
    epoch = seconds(lambda: train(model, batches))
    print(f"{'one LeNet MAP epoch':<36} {epoch:8.3f} s")
    for name, cost in (
        ("batching", batching),
        ("batching with random shifts", augmenting),
        ("DataLoader, sample by sample", loader),
    ):
        print(f"{name:<36} {cost:8.3f} s  {100 * cost / epoch:6.2f} % of the epoch")
    print(f"aim: batching below 5 %: {'reached' if batching < 0.05 * epoch else 'MISSED'}")


if __name__ == "__main__":
    main()
