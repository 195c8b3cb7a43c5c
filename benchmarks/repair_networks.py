"""The trained networks that repair.py prunes: trained once with `shaver.fit`, kept as safetensors files.

python benchmarks/repair_networks.py --runs runs/repair
"""

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import shaver


class Block(nn.Module):
    """Two 3 × 3 convolutions with BatchNorm around a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int, projection: bool) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(outputs)
        if projection:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        """Features of the same or half the resolution."""
        skip = self.downsample(x) if hasattr(self, "downsample") else x
        return F.relu(self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x))))) + skip)


class ResNet(nn.Module):
    """ResNet-20 of the one-shot pruning literature with three blocks in each of three stages; smaller ones too."""

    def __init__(self, widths: tuple[int, ...] = (16, 32, 64), depth: int = 3, channels: int = 3) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, widths[0], 3, 1, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(widths[0])
        before = widths[0]
        for stage, width in enumerate(widths, 1):
            blocks = []
            for place in range(depth):
                first = stage > 1 and place == 0
                blocks.append(Block(before if first else width, width, 2 if first else 1, first))
            setattr(self, f"layer{stage}", nn.Sequential(*blocks))
            before = width
        self.stages = len(widths)
        self.fc = nn.Linear(before, 10)

    def forward(self, x: Tensor) -> Tensor:
        """Logits."""
        x = F.relu(self.bn1(self.conv1(x)))
        for stage in range(1, self.stages + 1):
            x = getattr(self, f"layer{stage}")(x)
        return self.fc(x.mean((2, 3)))


def resnet20(path: Path) -> nn.Module:
    """The ResNet-20 for CIFAR-10 that WoodFisher, CBS, M-FAC and CHITA prune."""
    model = ResNet()
    missing = model.load_state_dict(load_file(path), strict=False)
    assert not missing.unexpected_keys, missing
    assert all("num_batches" in key for key in missing.missing_keys), missing
    return model.eval()


@dataclass(frozen=True)
class Experiment:
    """A network, its data and how it is trained."""

    network: str
    data: str
    method: str
    epochs: int


EXPERIMENTS = {
    "LeNet/MNIST MAP": Experiment("lenet", "mnist", "map", 12),
    "LeNet/Fashion MAP": Experiment("lenet", "fashion", "map", 12),
    "LeNet/MNIST SpaM": Experiment("lenet", "mnist", "spam", 12),
    "ResNet/MNIST MAP": Experiment("resnet", "mnist", "map", 5),
}


def trained(name: str, seed: int, runs: Path) -> dict[str, Any]:
    """Model, posterior (SpaM alone) and data of an experiment; trained now unless it was trained before."""
    asked = EXPERIMENTS[name]
    splits = shaver.data.load(asked.data)
    if asked.network == "resnet":
        torch.manual_seed(seed)
        model: nn.Module = ResNet((8, 16, 32), depth=1, channels=1)
        order = torch.randperm(len(splits.train), generator=torch.Generator().manual_seed(seed))[:10_000]
        train: Any = [splits.train[part] for part in order.split(128)]
    else:
        model, train = shaver.zoo.build(asked.network, seed=seed), splits.train
    folder = Path(runs) / f"{name.replace('/', '-').replace(' ', '-')}-{asked.epochs}-{seed}"
    file, posterior = folder / "model.safetensors", None
    if not file.exists():
        history = shaver.fit(model, train, method=asked.method, epochs=asked.epochs, seed=seed)
        folder.mkdir(parents=True, exist_ok=True)
        if history.posterior is not None:
            history.posterior.save(folder / "posterior.safetensors")
        save_file(model.state_dict(), file)
    model.load_state_dict(load_file(file))
    if (folder / "posterior.safetensors").exists():
        posterior = shaver.Posterior.load(folder / "posterior.safetensors")
    return {"model": model.eval(), "posterior": posterior, "splits": splits}


def trained_reader(runs: Path) -> dict[str, Any]:
    """MiniLM, fine-tuned by MAP on 1,200 IMDB reviews of 128 tokens for two epochs, with 1,000 test reviews."""
    from shaver.lab.recipes.language import build_reader, load_reviews, warm_up

    model = build_reader("minilm", seed=0)
    asked = {"name": "imdb", "length": 128, "samples": 1200, "test_samples": 1000, "scored": 64}
    splits = load_reviews({"name": "minilm"}, asked)
    file = Path(runs) / "MiniLM-IMDB-MAP-2-0" / "model.safetensors"
    if not file.exists():
        tuning: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-4, "batch_size": 16, "schedule": warm_up, "clip": 1.0}
        shaver.fit(model, splits.train, method="map", epochs=2, seed=0, **tuning)
        file.parent.mkdir(parents=True, exist_ok=True)
        save_file(model.state_dict(), file)
    model.load_state_dict(load_file(file))
    return {"model": model.eval(), "splits": splits}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, default=Path("runs/repair"))
    parser.add_argument("--seeds", type=int, default=3)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    for seed in range(asked.seeds):
        for name in EXPERIMENTS:
            found = trained(name, seed, asked.runs)
            accuracy = shaver.measure.quality(found["model"], found["splits"].test.batches(1000)).accuracy
            print(f"{name}, seed {seed}: {100 * accuracy:.2f}", flush=True)


if __name__ == "__main__":
    main()
