r"""SpaM and ordinary training of a residual network with BatchNorm, without a schedule and with one.

    python benchmarks/batchnorm.py --seeds 3

10,000 MNIST images at half resolution, 15 epochs, SGD with learning rate 0.05 and momentum 0.9. Where there is no
schedule, SpaM is once told the length of the training and once not. Accuracy on 6,000 other training images: as the
training leaves the network, with the norm statistics measured again, and the same after pruning by OPD (ordinary
training: by magnitude).
"""

import argparse
import statistics

import torch
import torch.nn.functional as F
from repair_networks import ResNet

import shaver

SPARSITIES = (0.8, 0.9, 0.95)


#: Method, whether the learning rate follows a cosine, and whether SpaM is told the length of the training.
TRAININGS = {
    "plain, constant": ("plain", False, False),
    "SpaM, constant": ("spam", False, False),
    "SpaM, constant, length known": ("spam", False, True),
    "plain, cosine": ("plain", True, True),
    "SpaM, cosine": ("spam", True, True),
}


def run(method: str, cosine: bool, known: bool, seed: int, epochs: int, samples: int) -> list[float]:
    """Accuracy in %: as trained, with new statistics, and at each sparsity."""
    data = shaver.data.load("mnist", valid_fraction=0.1)
    order = torch.randperm(len(data.train), generator=torch.Generator().manual_seed(seed))[:samples]
    images, labels = data.train[order]
    images = F.avg_pool2d(images, 2)
    valid = [(F.avg_pool2d(x, 2), y) for x, y in data.valid.batches(500)]
    torch.manual_seed(seed)
    model = ResNet((8, 16, 32), depth=1, channels=1)
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    steps = epochs * len(order.split(128))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps, 1e-6) if cosine else None
    length = steps if known else None
    spam = shaver.SpaM(model, samples, total_steps=length, seed=seed) if method == "spam" else None
    for _ in range(epochs):
        for part in torch.randperm(samples).split(128):
            loss = F.cross_entropy(model(images[part]), labels[part])
            optimizer.zero_grad()
            loss.backward()
            if spam is not None:
                spam.step(optimizer)
            else:
                optimizer.step()
            if schedule is not None:
                schedule.step()
    model.eval()
    found = [100 * shaver.measure.quality(model, valid).accuracy]
    posterior = None
    if spam is not None:
        posterior = spam.posterior
        spam.close()
    scores = shaver.score(model, "opd" if posterior else "magnitude", posterior=posterior)
    dense = {name: value.clone() for name, value in model.state_dict().items()}
    for sparsity in (0.0, *SPARSITIES):
        shaver.prune(model, scores, sparsity)
        shaver.recalibrate(model, images[:3000].split(500))
        found.append(100 * shaver.measure.quality(model, valid).accuracy)
        model.load_state_dict(dense)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--epochs", type=int, default=15)
    parser.add_argument("--samples", type=int, default=10_000)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    print("| training | as trained | new statistics | 80 % | 90 % | 95 % |\n|---|---|---|---|---|---|", flush=True)
    for name, training in TRAININGS.items():
        rows = [run(*training, seed, asked.epochs, asked.samples) for seed in range(asked.seeds)]
        cells = [
            f"{statistics.fmean(c):.2f}" + (f" ± {statistics.stdev(c) / len(c) ** 0.5:.2f}" if len(c) > 1 else "")
            for c in zip(*rows, strict=True)
        ]
        print(f"| {name} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
