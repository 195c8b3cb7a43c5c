"""The random state of a run: separate from the user's own, saved in checkpoints and restored from them."""

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch


def random_state() -> dict[str, Any]:
    """The state of every global random generator that a training loop may use: torch, CUDA, numpy, Python."""
    version, words, gauss = random.getstate()
    mersenne: Any = np.random.get_state(legacy=True)
    _, keys, position, has_gauss, cached = mersenne
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state_all() if torch.cuda.is_available() else [],
        "numpy": {"keys": torch.tensor(keys.tolist()), "rest": [int(position), int(has_gauss), float(cached)]},
        "python": {"version": version, "words": torch.tensor(words), "gauss": gauss},
    }


def set_random_state(state: Mapping[str, Any]) -> None:
    """Restore the state of every global generator from :func:`random_state`."""
    torch.set_rng_state(state["torch"])
    if torch.cuda.is_available() and state["cuda"]:
        torch.cuda.set_rng_state_all(state["cuda"])
    numpy, python = state["numpy"], state["python"]
    np.random.set_state(("MT19937", np.array(numpy["keys"].tolist(), dtype=np.uint32), *numpy["rest"]))
    random.setstate((python["version"], tuple(python["words"].tolist()), python["gauss"]))


@contextmanager
def own_randomness(seed: int) -> Iterator[None]:
    """Run a block with its own seed; afterwards the global random state is as before."""
    before = random_state()
    try:
        torch.manual_seed(seed)
        np.random.seed(seed % 2**32)
        random.seed(seed)
        yield
    finally:
        set_random_state(before)
