"""The prior θ_p ~ N(0, 1/δ_p): which weights share a precision δ.

===============  ============================================================================================
``"scalar"``     one δ for the network: weight decay
``"layer"``      one δ per parameter tensor
``"unit"``       δ = b_o · a_i for a weight from input unit i to output unit o; a channel is a unit
``"parameter"``  one δ per weight: automatic relevance determination
a function       a user's own grouping, see :func:`make_prior`
===============  ============================================================================================

The units of ``"unit"``, by tensor:

- Weight of a linear layer or a convolution of any dimension, transposed or not: dimensions 0 and 1 are the units. All
  kernel positions of a pair of units share its δ. In a grouped convolution, inputs at the same position in their
  groups share a factor.
- Embedding: its rows and columns. A ``(1, tokens, features)`` table: its tokens and features.
- Vector (bias, scale or shift of a norm layer): one δ per entry. Scalar: its own δ.
"""

import math
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from shaver.layouts import Axes, Index, Layout
from shaver.naming import check_name
from shaver.ranks import ALONE, Ranks
from shaver.selection import Selection
from shaver.settings import LOG_BOUNDS

#: A user's own grouping: group ids within the tensor, or one key for the whole tensor.
Grouping = Callable[[str, Tensor], "Tensor | Hashable"]


@dataclass(eq=False)
class Factor:
    """Positive values that are one factor of δ, and the weights that they belong to.

    Attributes:
        key: Its name in a state dict.
        layouts: Parameter name → which weights of that parameter share a value.
        values: The values. An update replaces the tensor and never writes in place, so a snapshot keeps its values.
        ranks: Processes that hold different weights of the same groups and must agree on the values.
    """

    key: str
    layouts: dict[str, Layout]
    values: Tensor
    ranks: Ranks = ALONE


class Prior:
    """δ for every trainable parameter, as products of :class:`Factor` values. Build one with :func:`make_prior`.

    Attributes:
        kind: ``"scalar"``, ``"layer"``, ``"unit"``, ``"parameter"``, or the name of a user's function.
        factors: The factors of δ.
        bounds: Lowest and highest log δ.
        parts: The factors in sets that share no parameter, so that the evidence is a sum over the sets.
    """

    def __init__(self, kind: str, factors: Iterable[Factor], bounds: tuple[float, float]) -> None:
        self.kind = kind
        self.factors = list(factors)
        self.bounds = bounds
        self._of: dict[str, list[Factor]] = {}
        parts: dict[frozenset[str], list[Factor]] = {}  # two factors that multiply cover the same single parameter
        for factor in self.factors:
            parts.setdefault(frozenset(factor.layouts), []).append(factor)
            for name in factor.layouts:
                self._of.setdefault(name, []).append(factor)
        self.parts = list(parts.values())

    def __repr__(self) -> str:
        return (
            f"Prior({self.kind!r}, {sum(f.values.numel() for f in self.factors)} numbers, {len(self._of)} parameters)"
        )

    @property
    def names(self) -> list[str]:
        """The parameters that have a prior."""
        return list(self._of)

    def delta_of(self, name: str) -> Tensor:
        """δ of one parameter, broadcastable to its shape. May be the prior's own tensor: do not write to it."""
        first, *rest = (factor.layouts[name].expand(factor.values) for factor in self._of[name])
        for other in rest:
            first = first * other
        return first

    def delta(self) -> dict[str, Tensor]:
        """δ of every parameter, each broadcastable to the parameter's shape."""
        return {name: self.delta_of(name) for name in self._of}

    def snapshot(self) -> "Prior":
        """A prior with the current δ that later updates do not change; shares memory until then."""
        return Prior(self.kind, [replace(f) for f in self.factors], self.bounds)

    def restore(self, name: str, earlier: "Prior") -> bool:
        """Give one parameter the δ of a snapshot. False, and no change, if it shares its δ with other parameters."""
        if any(len(factor.layouts) > 1 for factor in self._of[name]):
            return False
        for factor, old in zip(self._of[name], earlier._of[name], strict=True):
            factor.values = old.values
        return True

    def select(self, kept: Selection, added: Mapping[str, Tensor] | None = None, init: float = 1.0) -> "Prior":
        """The prior of a smaller network: each kept weight keeps its δ.

        Args:
            kept: Parameter → dimension → the kept positions.
            added: New parameters, such as a bias that a constant was folded into.
            init: Precision of the new parameters. Under the scalar prior they share the existing δ.
        """
        factors = []
        for factor in self.factors:
            layouts: dict[str, Layout] = {}
            values = factor.values
            for name, layout in factor.layouts.items():
                layouts[name], values = layout.select(values, kept.get(name, {}))
            factors.append(Factor(factor.key, layouts, values, factor.ranks))
        for name, parameter in (added or {}).items():
            if self.kind == "scalar":
                factors[0].layouts[name] = Axes(parameter.shape, ())
            else:
                made = _KINDS.get(self.kind, _layer)({name: parameter})
                made[0].values = made[0].values * init
                factors += made
        return Prior(self.kind, factors, self.bounds)

    def of_rows(self, rows: Mapping[str, Tensor], ranks: Ranks) -> "Prior":
        """The prior of this rank's rows of each parameter. All ranks share the factors that do not depend on rows."""
        here = self.select({name: {0: kept} for name, kept in rows.items()})
        for factor in here.factors:
            if not any(isinstance(layout, Axes) and 0 in layout.keep for layout in factor.layouts.values()):
                factor.ranks = ranks
        return here

    def fix_gauge(self) -> None:
        """Make the geometric mean of each second factor 1. The scale is free: (c·a, b/c) gives the same δ."""
        for part in self.parts:
            for factor in part[1:]:
                scale = factor.values.double().log().mean().exp().to(factor.values.dtype)
                factor.values = factor.values / scale
                part[0].values = part[0].values * scale

    def state_dict(self) -> dict[str, object]:
        """Kind, bounds and values; the layout follows from the model."""
        return {"kind": self.kind, "bounds": list(self.bounds), "values": {f.key: f.values for f in self.factors}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the values and bounds that :meth:`state_dict` returned.

        Raises:
            ValueError: The state belongs to another kind of prior or to another model.
        """
        values, bounds = state["values"], state["bounds"]
        if state["kind"] != self.kind:
            raise ValueError(
                f"the saved prior is {state['kind']!r}, this one is {self.kind!r}: use prior={state['kind']!r}."
            )
        mine = {f.key: tuple(f.values.shape) for f in self.factors}
        saved = {key: tuple(value.shape) for key, value in values.items()}
        if mine != saved:
            wrong = sorted(k for k in mine.keys() | saved.keys() if mine.get(k) != saved.get(k))
            raise ValueError(
                f"the saved {self.kind} prior belongs to another model: {wrong[0]!r} has shape "
                f"{saved.get(wrong[0], 'none')} there and {mine.get(wrong[0], 'none')} here "
                f"(tensors that differ: {len(wrong)})."
            )
        for factor in self.factors:
            factor.values = values[factor.key].to(factor.values, copy=True)
        self.bounds = (float(bounds[0]), float(bounds[1]))


def make_prior(
    kind: "str | Grouping",
    named_parameters: Mapping[str, Tensor],
    *,
    init: float = 1.0,
    bounds: tuple[float, float] = LOG_BOUNDS,
) -> Prior:
    """Create a prior for the given parameters, with δ = ``init`` everywhere.

    Example:
        >>> prior = make_prior("unit", dict(model.named_parameters()))
        >>> prior.delta()["fc1.weight"].shape
        torch.Size([84, 120])

        One precision per attention head of 64 features, and one per tensor for all others::

            def by_head(name, parameter):
                if name.endswith("query.weight"):
                    return torch.arange(len(parameter)).div(64, rounding_mode="floor").unsqueeze(1)
                return name

            make_prior(by_head, dict(model.named_parameters()))

    Args:
        kind: ``"scalar"``, ``"layer"``, ``"unit"``, ``"parameter"``, or a function ``group(name, parameter)``. The
            function returns an integer tensor of group ids, broadcastable to the parameter (ids are local to that
            parameter), or any hashable key for the whole tensor. Tensors with equal keys share one δ.
        named_parameters: The trainable parameters by name.
        init: The initial precision.
        bounds: Lowest and highest log δ.
    """
    low, high = bounds
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise ValueError(f"bounds must be the lowest and highest log δ, finite and in this order, not {bounds!r}.")
    if not (init > 0 and low <= math.log(init) <= high):
        raise ValueError(
            f"the initial precision {init!r} is outside the bounds {math.exp(low):g} to {math.exp(high):g}."
        )
    if not named_parameters:
        raise ValueError(
            "there are no parameters to put a prior on; do any of the model's parameters require gradients?"
        )
    if callable(kind) and not isinstance(kind, type):
        factors = _grouped(kind, named_parameters)
        name = getattr(kind, "__name__", type(kind).__name__)
    else:
        name = check_name("prior", kind, _KINDS)
        factors = _KINDS[name](named_parameters)
    prior = Prior(name, factors, (float(low), float(high)))
    for part in prior.parts:
        part[0].values = part[0].values * init
    return prior


def broadcasts(shape: torch.Size, target: torch.Size) -> bool:
    """Whether a tensor of ``shape`` broadcasts to ``target`` without enlarging it."""
    pairs = zip(reversed(shape), reversed(target), strict=False)
    return len(shape) <= len(target) and all(a in (1, b) for a, b in pairs)


def _ones(size: torch.Size | tuple[int, ...], like: Tensor) -> Tensor:
    """Ones in at least float32, even for half-precision weights: precisions span eighteen orders of magnitude."""
    dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
    return torch.ones(size, dtype=dtype, device=like.device)


def _factor(name: str, parameter: Tensor, keep: tuple[int, ...], key: str | None = None) -> Factor:
    """A factor of ones for one parameter, with one value per index along the dimensions ``keep``."""
    layout = Axes(parameter.shape, keep)
    return Factor(key or name, {name: layout}, _ones(layout.size, parameter))


def _scalar(parameters: Mapping[str, Tensor]) -> list[Factor]:
    first = next(iter(parameters.values()))
    return [Factor("scalar", {name: Axes(p.shape, ()) for name, p in parameters.items()}, _ones((), first))]


def _layer(parameters: Mapping[str, Tensor]) -> list[Factor]:
    return [_factor(name, p, ()) for name, p in parameters.items()]


def _parameter(parameters: Mapping[str, Tensor]) -> list[Factor]:
    return [_factor(name, p, tuple(range(p.ndim))) for name, p in parameters.items()]


def _unit(parameters: Mapping[str, Tensor]) -> list[Factor]:
    factors = []
    for name, p in parameters.items():
        first = 1 if p.ndim == 3 and p.shape[0] == 1 else 0  # (1, tokens, features)
        if p.ndim < 2:
            factors += _parameter({name: p})
        else:
            factors += [_factor(name, p, (dim,), f"{name}[{dim}]") for dim in (first, first + 1)]
    return factors


def _grouped(group: Grouping, parameters: Mapping[str, Tensor]) -> list[Factor]:
    factors: list[Factor] = []
    shared: dict[Hashable, Factor] = {}
    for name, p in parameters.items():
        ids = group(name, p)
        if ids is None or (not isinstance(ids, Tensor) and not isinstance(ids, Hashable)):
            raise TypeError(
                f"the grouping returned {ids!r} for {name!r}; it must return a tensor of group ids, or one hashable "
                "key for the whole tensor, such as the name."
            )
        if not isinstance(ids, Tensor):
            if ids not in shared:
                shared[ids] = Factor(f"key:{ids!r}", {}, _ones((), p))
                factors.append(shared[ids])
            shared[ids].layouts[name] = Axes(p.shape, ())
            continue
        if ids.is_floating_point() or ids.dtype == torch.bool or ids.numel() == 0 or int(ids.min()) < 0:
            raise ValueError(f"the group ids of {name!r} must be integers of at least 0, not {ids.dtype} ids {ids!r}.")
        if not broadcasts(ids.shape, p.shape):
            raise ValueError(
                f"the group ids of {name!r} have shape {tuple(ids.shape)}, which does not broadcast to the "
                f"parameter's {tuple(p.shape)}."
            )
        _, dense = torch.unique(ids, return_inverse=True)  # a gap in the ids would be a value without weights
        index = Index(p.shape, dense.to(p.device), int(dense.max()) + 1)
        factors.append(Factor(name, {name: index}, _ones(index.size, p)))
    return factors


_KINDS: dict[str, Callable[[Mapping[str, Tensor]], list[Factor]]] = {
    "scalar": _scalar,
    "layer": _layer,
    "unit": _unit,
    "parameter": _parameter,
}
