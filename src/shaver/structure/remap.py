"""Training goes on: the state of optimizers, of SpaM and of held masks follows a network that has become smaller."""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from shaver.pruning.hold import Hold
from shaver.pruning.masks import Masks
from shaver.selection import Dims, Selection, take
from shaver.structure.plan import Plan

if TYPE_CHECKING:
    from shaver.spam import SpaM


class Followers:
    """Everything that keeps numbers for each weight of a network, checked before and brought along afterwards.

    Args:
        model: The network, still whole.
        plan: What will be removed.
        optimizers: Those that train it.
        spam: Attached to it, or None.
        hold: Masks in force on it, or None.

    Raises:
        ValueError: One of them belongs to another network, or has a state that cannot follow.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, optimizers: Sequence[Optimizer], spam: "SpaM | None", hold: Hold | None
    ) -> None:
        self.model, self.plan, self.optimizers, self.spam, self.hold = model, plan, optimizers, spam, hold
        parameters = dict(model.named_parameters(remove_duplicate=False))
        #: Parameter → what stays of it, by every parameter that loses something.
        self.dims: dict[Tensor, Dims] = {
            parameters[name]: dims for name, dims in plan.kept.items() if name in parameters
        }
        self.weights = {bias: parameters[f"{bias.rpartition('.')[0]}.weight".removeprefix(".")] for bias in plan.biases}
        for optimizer in optimizers:
            self._check(optimizer, {id(p) for p in parameters.values()})
        if spam is not None and spam.model is not model:
            raise ValueError("spam is attached to another network than the one that is made smaller.")
        if hold is not None and hold._model is not model:
            raise ValueError("the masks are held on another network than the one that is made smaller.")

    def _check(self, optimizer: Optimizer, own: set[int]) -> None:
        kind = type(optimizer).__name__
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                f"{kind} keeps a history of whole steps, which cannot be sliced; build a new one afterwards."
            )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if held and not any(id(p) in own for p in held):
            raise ValueError(f"the {kind} optimizer trains another network than the one that is made smaller.")
        for parameter, dims in self.dims.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if _slices(value, parameter.shape, dims) is None:
                    raise ValueError(
                        f"{kind} keeps {key!r} of shape {tuple(value.shape)} for a parameter of shape "
                        f"{tuple(parameter.shape)}; only state shaped like its parameter can follow."
                    )

    def before(self) -> None:
        """To be called before the network is sliced: slice every state while the old shapes are known."""
        self._states: list[tuple[dict[str, Any], dict[str, Tensor]]] = []
        for optimizer in self.optimizers:
            for parameter, dims in self.dims.items():
                state = optimizer.state.get(parameter, {})
                sliced = {}
                for key, value in state.items():
                    where = _slices(value, parameter.shape, dims)
                    if where:
                        sliced[key] = take(value, where)
                self._states.append((state, sliced))
        self._masks = _sliced_masks(self.hold.masks, self.plan.kept) if self.hold is not None else None

    def after(self) -> None:
        """To be called when the network is small: put the sliced states in place."""
        for state, sliced in self._states:
            state.update(sliced)
        for bias, weight in self.weights.items():
            self._train(self.model.get_parameter(bias), weight)
        if self.spam is not None:
            self.spam.select(self.plan.kept)
        if self.hold is not None and self._masks is not None:
            self.hold.update(self._masks)

    def _train(self, bias: nn.Parameter, weight: Tensor) -> None:
        """A bias that was added is trained as the layer's weight is."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if any(p is weight for p in group["params"]):
                    group["params"].append(bias)


def _slices(value: object, shape: torch.Size, dims: Dims) -> dict[int, Tensor] | None:
    """How one state follows: like its parameter, also where it has 1 for a dimension that it sums up; None if not."""
    if not isinstance(value, Tensor) or value.numel() <= 1:
        return {}
    if value.ndim != len(shape) or any(n not in (1, full) for n, full in zip(value.shape, shape, strict=True)):
        return None
    return {dim: positions for dim, positions in dims.items() if value.shape[dim] == shape[dim]}


def _sliced_masks(masks: Mapping[str, Tensor], kept: Selection) -> Masks:
    return Masks({name: take(mask, kept.get(name)) for name, mask in masks.items()})
