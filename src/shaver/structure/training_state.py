"""The state of optimizers, SpaM and held masks, sliced with the network so that training can go on."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from shaver.pruning.masks import Hold, Masks
from shaver.selection import Dims, take
from shaver.structure.record import RemovalRecord

if TYPE_CHECKING:
    from shaver.spam import SpaM


class TrainingState:
    """What keeps values per weight of a network: checked and sliced before the removal, put in place after it."""

    def __init__(
        self,
        model: nn.Module,
        record: RemovalRecord,
        optimizers: Sequence[Optimizer],
        spam: "SpaM | None",
        hold: Hold | None,
    ) -> None:
        self.model, self.record, self.optimizers, self.spam, self.hold = model, record, optimizers, spam, hold
        parameters = dict(model.named_parameters(remove_duplicate=False))
        #: Parameter → what stays of it, for every parameter that loses something.
        self.dims: dict[Tensor, Dims] = {
            parameters[name]: dims for name, dims in record.kept.items() if name in parameters
        }
        self.weights = {
            bias: parameters[f"{bias.rpartition('.')[0]}.weight".removeprefix(".")] for bias in record.biases
        }
        for optimizer in optimizers:
            self._check(optimizer, {id(p) for p in parameters.values()})
        if spam is not None and getattr(spam, "model", None) is not model:
            raise ValueError("spam belongs to another network, not to the one being made smaller.")
        if hold is not None and hold._model is not model:
            raise ValueError("the masks are held on another network, not on the one being made smaller.")

    def _check(self, optimizer: Optimizer, own: set[int]) -> None:
        kind = type(optimizer).__name__
        if isinstance(optimizer, LBFGS):
            raise ValueError(
                f"{kind} keeps a history of whole steps, which cannot be sliced; build a new one afterwards."
            )
        held = [p for group in optimizer.param_groups for p in group["params"]]
        if held and not any(id(p) in own for p in held):
            raise ValueError(f"the {kind} optimizer trains another network, not the one being made smaller.")
        for parameter, dims in self.dims.items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if _slices(value, parameter.shape, dims) is None:
                    raise ValueError(
                        f"{kind} keeps {key!r} of shape {tuple(value.shape)} for a parameter of shape "
                        f"{tuple(parameter.shape)}; only state shaped like its parameter can be sliced."
                    )

    def slice(self) -> None:
        """Slice every state; called before the network is sliced, while the old shapes are known."""
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
        held = {} if self.hold is None else self.hold.masks
        self._masks = Masks({name: take(mask, self.record.kept.get(name)) for name, mask in held.items()})

    def put(self) -> None:
        """Put the sliced states in place; called after the network is sliced."""
        for state, sliced in self._states:
            state.update(sliced)
        for bias, weight in self.weights.items():
            self._train(self.model.get_parameter(bias), weight)
        if self.spam is not None:
            self.spam.select(self.record.kept)
        if self.hold is not None:
            self.hold.update(self._masks)

    def _train(self, bias: nn.Parameter, weight: Tensor) -> None:
        """Train an added bias with the optimizers of the layer's weight."""
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                if any(p is weight for p in group["params"]):
                    group["params"].append(bias)


def _slices(value: object, shape: torch.Size, dims: Dims) -> dict[int, Tensor] | None:
    """How a state is sliced: like its parameter, except along dimensions that it sums up; None if it cannot be."""
    if not isinstance(value, Tensor) or value.numel() <= 1:
        return {}
    if value.ndim != len(shape) or any(n not in (1, full) for n, full in zip(value.shape, shape, strict=True)):
        return None
    return {dim: positions for dim, positions in dims.items() if value.shape[dim] == shape[dim]}
