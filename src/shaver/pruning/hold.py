"""Holding zeros: pruned weights stay zero while the rest is trained."""

from collections.abc import Mapping
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

if TYPE_CHECKING:
    from shaver.pruning.masks import Masks


class Hold:
    """Masks in force on a model, from :meth:`shaver.pruning.Masks.hold`, until :meth:`release`.

    Attributes:
        masks: The masks in force.
    """

    def __init__(self, masks: "Masks", model: nn.Module, optimizer: Optimizer | None = None) -> None:
        self.masks = masks
        self._model, self._optimizer = model, optimizer
        self._parameters = masks.parameters(model)
        self._handles: list[Any] = []
        self.apply_()
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                hook = partial(self._zero_gradient, name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        if optimizer is not None:
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self.apply_()))
        else:
            self._handles.append(model.register_forward_pre_hook(lambda *_: self.apply_()))

    def apply_(self) -> None:
        """Zero the masked weights, their gradients, and every optimizer state that is shaped like them."""
        for name, parameter in self._parameters.items():
            self._zero(name, parameter.data)
            self._zero(name, parameter.grad)
            state: Mapping[str, Any] = self._optimizer.state.get(parameter, {}) if self._optimizer is not None else {}
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    self._zero(name, value)

    def update(self, masks: "Masks") -> None:
        """Put other masks for the same parameters in force; nothing is changed if they do not fit.

        Raises:
            ValueError: They name other parameters, or have other shapes.
        """
        if set(masks) != set(self.masks):
            raise ValueError("the new masks name other parameters than the ones in force; release() and hold anew.")
        masks.parameters(self._model)
        self.masks = masks
        self.apply_()

    def release(self) -> None:
        """Let go: the zeros are now ordinary weights. Safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _zero_gradient(self, name: str, parameter: Tensor) -> None:
        self._zero(name, parameter.grad)

    def _zero(self, name: str, values: Tensor | None) -> None:
        if values is None:
            return
        with torch.no_grad():
            values.masked_fill_(~self.masks[name].to(values.device), 0)

    def __enter__(self) -> "Hold":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()
