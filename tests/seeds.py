"""Other draws for the same tests: ``SHAVER_TEST_SEED=n`` adds n to every seed that a test, or the library in it, sets.

A statement about the method holds for every draw, so a test must not pass on one draw only. The package of tests
applies the offset when it is imported; processes that a test starts import it too and get the same draws.
"""

import os

import torch

OFFSET = int(os.environ.get("SHAVER_TEST_SEED") or 0)


class ShiftedGenerator(torch.Generator):
    """A generator whose seeds are shifted by the offset."""

    def manual_seed(self, seed: int) -> torch.Generator:
        return super().manual_seed((seed + OFFSET) % 2**64)


def shift_seeds() -> None:
    """Shift ``torch.manual_seed`` and the seeds of all generators made from now on."""
    unshifted = torch.manual_seed
    torch.manual_seed = lambda seed: unshifted((int(seed) + OFFSET) % 2**64)
    torch.Generator = ShiftedGenerator  # type: ignore[misc]
