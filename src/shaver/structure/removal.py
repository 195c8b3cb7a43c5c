"""Removing units: from a masked network to a smaller dense one that is checked to compute the same."""

import math
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook
from torch.optim import Optimizer
from torch.utils._pytree import tree_map_only

from shaver.batches import Forward, check_values, tensors_in
from shaver.curvature.capture import copied, undisturbed
from shaver.measure.example import Example, call
from shaver.pruning.masks import Hold
from shaver.selection import take
from shaver.structure.folded_bias import folded_biases, readers_of, recording
from shaver.structure.groups import Groups, Kept, check_groups, mask_units, tensors_of
from shaver.structure.inputs import VariedInputs, check_example
from shaver.structure.record import RemovalRecord, output_dim, record_of, resize, weight_beside
from shaver.structure.training_state import sliced_training_state

if TYPE_CHECKING:
    from shaver.spam import SpaM

#: The largest difference between compact and masked outputs, relative to the largest output.
TOLERANCES = {torch.float64: 1e-12, torch.float32: 1e-6}
#: Inputs that are drawn for the comparison, in addition to the example.
DRAWS = 2


class CompactionError(ValueError):
    """The smaller network would not compute what the masked one does; nothing was changed."""


@dataclass(frozen=True)
class Removal:
    """The result of :func:`remove_units`.

    Attributes:
        model: The small network.
        record: What was removed in this call.
        difference: Between compact and masked outputs, relative to the largest output; the largest over all inputs.
        folded: Biases that took up a constant.
    """

    model: nn.Module
    record: RemovalRecord
    difference: float
    folded: tuple[str, ...]


def remove_units(
    model: nn.Module,
    groups: Groups,
    kept: Kept,
    example: Example,
    *,
    forward: Forward | None = None,
    mask: bool = True,
    in_place: bool = False,
    optimizer: Optimizer | Sequence[Optimizer] | None = None,
    spam: "SpaM | None" = None,
    hold: Hold | None = None,
    tolerance: float | None = None,
) -> Removal:
    """Remove units from the network. The small network computes the same as the masked one, in evaluation mode.

    Example:
        >>> groups = find_groups(model, example)
        >>> kept = {"conv1": torch.tensor([True, False, True, True, False, True])}
        >>> small = remove_units(model, groups, kept, example).model
        >>> remove_units(model, groups, kept, example, in_place=True, optimizer=optimizer, spam=spam)

    Both networks are run on the example and on varied inputs of the same kind. Where float32 rounding alone may exceed
    the tolerance, the comparison is repeated in float64. In place, parameters stay the same objects, sliced, so
    optimizers, schedulers and hooks stay valid; wrappers that keep shapes of their own (DistributedDataParallel, a
    compiled graph) must be rebuilt.

    Args:
        model: The network; it is changed only with ``in_place``, and not before the check has passed.
        groups: Its groups.
        kept: Group → one truth value per unit; groups that are absent stay whole.
        example: An input for the check: a tensor, a tuple of positional or a dict of keyword arguments.
        forward: ``forward(model, example)``, where the network is called in another way.
        mask: Mask the units first, as :func:`mask_units` does. False: the units do nothing already; constants that
            they still give are folded into the biases of the layers that read them.
        in_place: Change this network instead of a copy.
        optimizer: One or several that train the network: their state is sliced too. Needs ``in_place``, as do ``spam``
            and ``hold``.
        spam: Its δ and curvature are sliced too.
        hold: Masks in force, sliced too.
        tolerance: Largest relative difference; by default 1e-6, in float64 1e-12.

    Raises:
        CompactionError: The small network does not compute the same; says which group and layer. Nothing is changed.
        ValueError: ``kept`` does not fit the groups or removes a whole group, or a state cannot be sliced.
    """
    check_values(model, "remove_units")
    example = check_example(example, forward)
    check_groups(groups, model)
    groups.check_kept(kept)
    for name, keep in kept.items():
        if not bool(keep.any()):
            raise ValueError(f"kept[{name!r}] keeps none of {groups[name].units} units; a layer needs at least one.")
    single = optimizer is not None and not isinstance(optimizer, list | tuple)
    optimizers: Sequence[Any] = [optimizer] if single else optimizer or ()  # type: ignore[assignment]
    if not all(isinstance(one, Optimizer) for one in optimizers):
        raise TypeError(f"optimizer takes one torch.optim.Optimizer or several, not {optimizer!r}.")
    if not in_place and (optimizers or spam is not None or hold is not None):
        raise ValueError("an optimizer, SpaM or held masks belong to the network itself: pass in_place=True with them.")
    kept = {name: keep for name, keep in kept.items() if not bool(keep.all())}
    small = _Trial(model, groups, kept, example, forward or call, mask, tolerance).passed()
    if not in_place:
        return small
    with sliced_training_state(model, small.record, optimizers, spam, hold), torch.no_grad():
        resize(model, small.record)
        for name in small.folded:
            model.get_parameter(name).copy_(small.model.get_parameter(name))
    return replace(small, model=model)


class _Trial:
    """Makes the small network from a copy, and compares it with the masked one."""

    def __init__(
        self,
        model: nn.Module,
        groups: Groups,
        kept: Kept,
        example: Example,
        forward: Callable[[nn.Module, Any], Any],
        mask: bool,
        tolerance: float | None,
    ) -> None:
        self.model, self.groups, self.kept = model, groups, kept
        self.inputs, self.varied = [example], VariedInputs(model, forward, example)
        self.mask, self.tolerance = mask, tolerance
        # A network that works in place must not change the inputs.
        self.forward: Callable[[nn.Module, Any], Any] = lambda network, batch: forward(network, copied(batch))
        self.copy = model
        self.dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)

    def passed(self) -> Removal:
        """The small network, or an error that says where it differs."""
        name = type(self.model).__name__
        try:  # so that a wrong example is not mistaken for a wrong removal
            with undisturbed(self.model), torch.no_grad():
                self.forward(self.model, self.inputs[0])
        except Exception as error:  # whatever the user's network raises
            raise ValueError(f"{name} does not run on the example: {_first_line(error)}.") from error
        self.inputs += [*self.varied.draws(DRAWS), *self.varied.sequences()]
        try:
            small = self.attempt(self.kept, self.dtype)
            limit = self.limit(self.dtype)
            if small.difference <= limit or (self.dtype != torch.float64 and self.holds_in_double()):
                return small
            reason = (
                f"its outputs differ by {small.difference:.2g} of the largest, more than {limit:.2g}; a module that "
                "keeps a width or a number of heads in an attribute needs shaver.structure.register_surgery"
            )
        except (CompactionError, RuntimeError, IndexError, TypeError, ValueError) as error:
            reason = _first_line(error)
        raise CompactionError(f"{name} cannot be made smaller like this: {reason}.{self.blame()}") from None

    def limit(self, dtype: torch.dtype) -> float:
        """The largest difference allowed."""
        return TOLERANCES.get(dtype, 0.0) if self.tolerance is None else self.tolerance

    def holds_in_double(self) -> bool:
        """Whether the same comparison holds without float32's rounding."""
        try:
            return self.attempt(self.kept, torch.float64).difference <= self.limit(torch.float64)
        except (RuntimeError, ValueError):  # a network that insists on its own precision
            return False

    def attempt(self, kept: Kept, dtype: torch.dtype) -> Removal:
        """Mask, measure, slice and fold a copy, in some precision."""
        copy, inputs = deepcopy(self.model), self.inputs
        if dtype != self.dtype:
            copy = copy.to(dtype)
            inputs = [tree_map_only(Tensor, lambda x: x.to(dtype) if x.is_floating_point() else x, b) for b in inputs]
        self.copy = copy
        if self.mask:
            mask_units(copy, self.groups, kept).apply_(copy)
        readers = readers_of(copy, self.groups, kept)
        with undisturbed(copy), torch.no_grad(), recording(readers):
            expected = [_outputs(self.forward(copy, batch)) for batch in inputs]
        biases = folded_biases(readers, TOLERANCES.get(dtype, 1e-2))
        new = tuple(name for name in biases if name not in tensors_of(copy))
        record = replace(record_of(copy, self.groups, kept), biases=new)
        resize(copy, record)
        with undisturbed(copy), torch.no_grad():
            for name, values in biases.items():
                layer = copy.get_submodule(name.rpartition(".")[0])
                rows = record.kept.get(weight_beside(name), {}).get(output_dim(layer))
                copy.get_parameter(name).copy_(values if rows is None else take(values, {0: rows}))
            found = [_outputs(self.forward(copy, batch)) for batch in inputs]
        difference = max(_difference(*pair) for pair in zip(expected, found, strict=True))
        return Removal(copy, record, difference, tuple(biases))

    def blame(self) -> str:
        """Which groups alone fail, and at which layer."""
        lines = []
        for name, keep in self.kept.items():
            entered: list[nn.Module] = []
            hook = register_module_forward_pre_hook(lambda module, _, entered=entered: entered.append(module))  # type: ignore[misc]
            try:
                difference = self.attempt({name: keep}, self.dtype).difference
                limit = max(self.limit(self.dtype), 1e-4 if self.dtype != torch.float64 else 0.0)
                if difference > limit:
                    lines.append(f"group {name!r} alone: outputs differ by {difference:.2g}")
            except (CompactionError, RuntimeError, IndexError, TypeError, ValueError) as error:
                names = {module: of for of, module in self.copy.named_modules()}
                layer = next((names[module] for module in reversed(entered) if module in names), "the input")
                lines.append(f"group {name!r} alone fails at {layer!r}: {_first_line(error)}")
            finally:
                hook.remove()
        return (" " + "; ".join(lines[:3]) + ".") if lines else ""


def _outputs(result: Any) -> list[Tensor]:
    """The tensors in what a network returned: its logits or last hidden state where it says so, else all of them."""
    for key in ("logits", "last_hidden_state"):
        named = result.get(key) if isinstance(result, Mapping) else getattr(result, key, None)
        if isinstance(named, Tensor):
            result = named
    found = [tensor for tensor in tensors_in(result) if tensor.is_floating_point()]
    if not found:
        raise TypeError(
            f"the network returned a {type(result).__name__} without a tensor to compare; pass forward=lambda model, "
            "example: … that returns the outputs"
        )
    return [tensor.detach() for tensor in found]


def _difference(expected: list[Tensor], found: list[Tensor]) -> float:
    """The largest difference, relative to the largest value expected; infinite where shapes or NaNs differ."""
    if len(expected) != len(found) or any(a.shape != b.shape for a, b in zip(expected, found, strict=True)):
        raise CompactionError(
            f"its outputs would have shapes {[tuple(t.shape) for t in found]} instead of "
            f"{[tuple(t.shape) for t in expected]}"
        )
    worst = 0.0
    for a, b in zip(expected, found, strict=True):
        if a.numel():
            difference = float((a.double() - b.double()).abs().max())
            if math.isnan(difference):
                return math.inf
            worst = max(worst, difference / (float(a.double().abs().max()) or 1.0))
    return worst


def _first_line(error: Exception) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0].rstrip(".")
