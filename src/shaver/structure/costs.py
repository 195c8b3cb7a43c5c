"""The cost of a network without some units: its parameters, FLOPs or latency as a function of the widths."""

import copy
import math

import torch
from torch import nn

from shaver.measure import flops, latency
from shaver.measure.example import Example, samples_of
from shaver.naming import check_name
from shaver.structure.groups import Groups, Kept
from shaver.structure.record import record_of, resize

#: What a sparsity can be a share of.
TARGETS = ("units", "parameters", "flops", "latency")


class Costs:
    """The cost of the network if only some units are kept. Each set of widths is measured once.

    Parameters are counted from the shapes that remain. FLOPs are counted, and latency is measured, on a compact copy:
    on one thread, at the example's batch size, the median of up to 20 calls.
    """

    def __init__(self, model: nn.Module, groups: Groups, target: str, example: Example | None = None) -> None:
        self.target = check_name("target", target, TARGETS[1:])
        if target != "parameters" and example is None:
            raise ValueError(f"target={target!r} is measured on an input: pass example=….")
        self._model, self._groups, self._example = model, groups, example
        self._known: dict[tuple[int, ...], float] = {}

    def __call__(self, kept: Kept) -> float:
        """The cost when these units are kept; groups that are absent stay whole."""
        widths = tuple(int(kept[name].sum()) if name in kept else group.units for name, group in self._groups.items())
        if widths not in self._known:
            self._known[widths] = self._measure(kept)
        return self._known[widths]

    @property
    def dense(self) -> float:
        """The cost of the network as it is."""
        return self({})

    def price(self, name: str) -> float:
        """The cost of one unit of a group: the saving without its first unit, with all other groups whole."""
        keep = torch.ones(self._groups[name].units, dtype=torch.bool)
        if len(keep) == 1:
            return self.dense
        keep[0] = False
        return self.dense - self({name: keep})

    def _measure(self, kept: Kept) -> float:
        if self.target == "parameters":
            return parameters_left(self._model, self._groups, kept)
        assert self._example is not None
        try:
            network = self._model
            if kept:  # a copy of these widths: it costs what the compact network costs, but computes something else
                network = copy.deepcopy(network)
                resize(network, record_of(network, self._groups, kept))
            if self.target == "flops":
                return flops(network, self._example).dense
            samples = samples_of(self._example)
            return latency(network, self._example, batch_size=samples, repeats=20, seconds=0.5).median
        except Exception as error:  # whatever the user's network raises at these widths
            widths = ", ".join(f"{name} {int(keep.sum())} of {len(keep)}" for name, keep in kept.items())
            raise ValueError(
                f"{self.target} cannot be measured on {type(self._model).__name__} at the widths {widths or 'it has'}: "
                f"{error}"
            ) from error


def parameters_left(model: nn.Module, groups: Groups, kept: Kept) -> int:
    """Number of parameters of the compact network; a parameter shared by several layers counts once."""
    staying = record_of(model, groups, kept).kept
    total = 0
    for name, parameter in model.named_parameters():
        left = staying.get(name, {})
        total += math.prod(len(left[dim]) if dim in left else size for dim, size in enumerate(parameter.shape))
    return total
