"""Kills and damage: runs of ``fit`` killed at random moments, and checkpoints and posteriors with damaged bytes.

    python benchmarks/kills_and_damage.py                    # 100 kills, 250 checkpoints, 150 posteriors: five minutes
    python benchmarks/kills_and_damage.py --kills 10 --checkpoints 25 --posteriors 15

A killed run must end with the bits of an undisturbed one. A damaged file must be refused in words, or give the very
numbers that were written (a checkpoint: because the one before it was used). Exits with 1 if anything else happens.
"""

import argparse
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import shaver
from shaver.io import load_state

EPOCHS = 6
QUICK = {"every": 2, "update": 5}
#: The kinds of training, each with the settings of ``fit``.
TRAININGS: dict[str, dict[str, Any]] = {
    "map": {"method": "map"},
    "l1, adamw": {"method": "l1", "optimizer": "adamw"},
    "spam": {"method": "spam", "spam": QUICK},
    "spam, adam, unit prior": {"method": "spam", "spam": QUICK | {"prior": "unit"}, "optimizer": "adam"},
    "spam, online pruning": {"method": "spam", "spam": QUICK, "online": shaver.pruning.Online(0.8, every=3)},
}


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    y = torch.randint(0, 3, (160,), generator=generator)
    x = torch.randn(160, 6, generator=generator)
    x[:, 0] += 3.0 * (y == 1)
    x[:, 1] += 3.0 * (y == 2)
    return list(zip(x.split(16), y.split(16), strict=True))


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Dropout(0.2), nn.Linear(12, 3))


def train(folder: Path | None, settings: dict[str, Any], pause: float = 0.0) -> dict[str, Tensor]:
    """The final state of a training; ``pause`` makes each step last longer, so that a kill can hit it."""
    model = network()

    def forward(model: nn.Module, batch: Any) -> Tensor:
        time.sleep(pause)
        found: Tensor = model(batch[0])
        return found

    shaver.fit(model, batches(), batches(), epochs=EPOCHS, folder=folder, forward=forward, progress=False, **settings)
    return model.state_dict()


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def kill(moment: float, folder: Path, settings: dict[str, Any]) -> bool:
    """Start a training in a child process and kill it after ``moment`` seconds; False if it was done before."""
    child = os.fork()
    if child == 0:
        try:
            train(folder, settings, pause=0.002)
        finally:
            os._exit(0)
    time.sleep(moment)
    os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return os.WIFSIGNALED(status)


def kills(count: int, chance: random.Random, place: Path) -> Counter[str]:
    """Kill ``count`` runs, some of them several times, and finish each."""
    wanted, seconds = {}, {}
    for name, settings in TRAININGS.items():
        wanted[name] = train(None, settings)
        began = time.perf_counter()
        train(place / "timed", settings, pause=0.002)
        seconds[name] = time.perf_counter() - began
        shutil.rmtree(place / "timed")
    outcome: Counter[str] = Counter()
    while outcome["killed"] < count:
        name = chance.choice(list(TRAININGS))
        folder = place / f"run-{outcome['killed']}"
        for _ in range(chance.choice([1, 1, 2, 3])):
            if outcome["killed"] == count or not kill(chance.uniform(0, seconds[name]), folder, TRAININGS[name]):
                break
            epochs = len(list(folder.glob("checkpoint-*"))) if folder.exists() else 0
            outcome["killed"] += 1
            outcome["with a checkpoint"] += epochs > 0
            left = shutil.copytree(folder, place / "resumed") if folder.exists() else place / "resumed"
            outcome["identical" if same(train(left, TRAININGS[name]), wanted[name]) else "WRONG"] += 1
            shutil.rmtree(place / "resumed")
        shutil.rmtree(folder, ignore_errors=True)
    return outcome


def damaged(content: bytes, chance: random.Random) -> tuple[str, bytes]:
    """A kind of damage, and what is left of a file."""
    size, at = len(content), chance.randrange(len(content))
    block = chance.randint(1, 200)
    kinds: dict[str, Callable[[], bytes]] = {
        "a flipped bit": lambda: content[:at] + bytes([content[at] ^ 1 << chance.randrange(8)]) + content[at + 1 :],
        "cut short": lambda: content[:at],
        "zeros": lambda: content[:at] + bytes(len(content[at : at + block])) + content[at + block :],
        "noise": lambda: content[:at] + chance.randbytes(len(content[at : at + block])) + content[at + block :],
        "a block lost": lambda: content[:at] + content[at + block :],
        "a block twice": lambda: content[: at + block] + content[at:],
        "halves swapped": lambda: content[size // 2 :] + content[: size // 2],
        "bytes at the end": lambda: content + chance.randbytes(block),
        "a digit of the header": lambda: _other_digit(content, chance),
    }
    kind = chance.choice(list(kinds))
    return kind, kinds[kind]()


def _other_digit(content: bytes, chance: random.Random) -> bytes:
    """Another digit in the header's JSON: still readable, with other numbers."""
    header = 8 + int.from_bytes(content[:8], "little")
    places = [i for i in range(8, header) if chr(content[i]).isdigit()]
    at = chance.choice(places)
    return content[:at] + str((int(chr(content[at])) + 1) % 10).encode() + content[at + 1 :]


def checkpoints(count: int, chance: random.Random, place: Path) -> Counter[str]:
    """Damage the newest checkpoint of an interrupted run, or both, and continue."""
    outcome: Counter[str] = Counter()
    runs = {}
    for name, settings in TRAININGS.items():
        folder = place / name
        runs[name] = (folder, train(folder, settings))
        newest = max(folder.glob("checkpoint-*"))
        assert load_state(newest)["epoch"] == EPOCHS
    for trial in range(count):
        name = chance.choice(list(runs))
        folder = Path(shutil.copytree(runs[name][0], place / f"damaged-{trial}"))
        older, newest = sorted(folder.glob("checkpoint-*"))
        for path in (newest, older) if chance.random() < 0.3 else (newest,):
            kind, content = damaged(path.read_bytes(), chance)
            path.write_bytes(content)
        outcome[_outcome(lambda: same(train(folder, TRAININGS[name]), runs[name][1]), kind)] += 1  # noqa: B023
        shutil.rmtree(folder)
    return outcome


def posteriors(count: int, chance: random.Random, place: Path) -> Counter[str]:
    """Damage a posterior and load it."""
    path, outcome = place / "posterior.safetensors", Counter[str]()
    for prior in ("parameter", "unit", "scalar"):
        model = network()
        shaver.fit(model, batches(), epochs=2, spam=QUICK | {"prior": prior}).posterior.save(path)  # type: ignore[union-attr]
        original, content = load_state(path), path.read_bytes()
        for _ in range(-(-count // 3)):
            kind, left = damaged(content, chance)
            path.write_bytes(left)
            outcome[_outcome(lambda: _equal(shaver.Posterior.load(path).state_dict(), original), kind)] += 1  # noqa: B023
    return outcome


def _outcome(attempt: Callable[[], bool], kind: str) -> str:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return "same numbers" if attempt() else f"WRONG NUMBERS ({kind})"
        except ValueError:
            return "refused in words"
        except Exception as error:
            return f"CRASHED ({kind}, {type(error).__name__}: {error})"


def _equal(a: object, b: object) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, dict):
        return isinstance(b, dict) and a.keys() == b.keys() and all(_equal(a[key], b[key]) for key in a)
    if isinstance(a, tuple | list):
        return isinstance(b, tuple | list) and len(a) == len(b) and all(map(_equal, a, b))
    return a == b


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--checkpoints", type=int, default=250)
    parser.add_argument("--posteriors", type=int, default=150)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    torch.set_num_threads(1)
    chance, bad = random.Random(asked.seed), 0
    with tempfile.TemporaryDirectory() as folder:
        for name, run, count in (
            ("killed runs", kills, asked.kills),
            ("damaged checkpoints", checkpoints, asked.checkpoints),
            ("damaged posteriors", posteriors, asked.posteriors),
        ):
            place = Path(folder) / name.replace(" ", "-")
            place.mkdir()
            outcome = run(count, chance, place) if count else Counter[str]()
            bad += sum(number for kind, number in outcome.items() if kind[:5].isupper())
            print(f"{name}: {json.dumps(outcome, ensure_ascii=False)}", flush=True)
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
