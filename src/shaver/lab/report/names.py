"""Names in tables, in figures and on the page, and their order."""

from collections.abc import Iterable
from dataclasses import dataclass


class Names(dict[str, str]):
    """Names by key; an unknown key is its own name."""

    def __missing__(self, key: str) -> str:
        return key


METHOD_NAMES = Names({"map": "MAP", "l1": "L1", "spam": "SpaM", "vd": "Sparse VD", "l0": "L0"})
CRITERION_NAMES = Names({
    "opd": "OPD", "obd": "OBD", "magnitude": "magnitude", "snip": "SNIP", "grasp": "GraSP", "synflow": "SynFlow",
    "wanda": "Wanda", "random": "random",
})  # fmt: skip
PRIOR_NAMES = Names({"scalar": "scalar", "layer": "layer-wise", "unit": "unit-wise", "parameter": "parameter-wise"})
STRUCTURE_NAMES = Names({"diag": "Diag", "kron": "KFAC"})
SOURCE_NAMES = Names({"ggn": "GGN", "ef": "EF", "mc": "MC"})
STAGE_NAMES = Names({
    "posthoc": "post hoc", "repaired": "repaired", "finetuned": "fine-tuned", "online": "online",
    "structured": "structured", "two-steps": "two SpaM steps after training",
})  # fmt: skip


@dataclass(frozen=True)
class Metric:
    """A measure of quality: its column, how it is written, and which direction is good."""

    key: str
    title: str
    factor: float
    digits: int
    lower_is_better: bool

    def text(self, value: float, digits: int | None = None) -> str:
        """The value as tables show it."""
        return f"{value * self.factor:.{self.digits if digits is None else digits}f}"


METRICS = (
    Metric("accuracy", "test accuracy, %", 100.0, 2, lower_is_better=False),
    Metric("nll", "negative log likelihood", 1.0, 3, lower_is_better=True),
    Metric("ece", "calibration error (ECE), %", 100.0, 2, lower_is_better=True),
    Metric("brier", "Brier score", 1.0, 3, lower_is_better=True),
)


def in_order(given: Iterable[str], known: Iterable[str] = tuple(CRITERION_NAMES)) -> list[str]:
    """The names without repeats: the known ones in their order, then the others."""
    found, order = list(dict.fromkeys(given)), list(known)
    return [name for name in order if name in found] + [name for name in found if name not in order]
