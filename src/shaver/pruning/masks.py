"""Masks: which weights of each parameter are kept, and a hold that keeps the others zero during training."""

import os
from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import prune as torch_prune
from torch.optim import Optimizer

from shaver.io import load_state, save_state

_FORMAT, _VERSION = "shaver.masks", 1


class Masks(Mapping[str, Tensor]):
    """One boolean tensor per pruned parameter, true where the weight is kept.

    Example:
        >>> layer = nn.Linear(2, 2)
        >>> masks = Masks({"weight": torch.tensor([[True, False], [True, True]])})
        >>> masks.apply_(layer)
        >>> float(layer.weight[0, 1]), masks.sparsity
        (0.0, 0.25)

    ``masks & others`` keeps what both keep. :meth:`hold` keeps the zeros during further training.
    """

    def __init__(self, masks: Mapping[str, Tensor]) -> None:
        if not isinstance(masks, Mapping):
            raise TypeError(f"masks are a dict of boolean tensors by parameter name, not {masks!r}.")
        for name, mask in masks.items():
            if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
                kind = mask.dtype if isinstance(mask, Tensor) else repr(mask)
                raise TypeError(f"the mask of {name!r} is {kind}; masks are boolean, true where a weight is kept.")
        self._masks = dict(masks)

    def __getitem__(self, name: str) -> Tensor:
        return self._masks[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._masks)

    def __len__(self) -> int:
        return len(self._masks)

    def __repr__(self) -> str:
        return f"Masks({len(self)} parameters, {self.kept} of {self.total} weights kept, sparsity {self.sparsity:.4f})"

    def __and__(self, other: "Mapping[str, Tensor]") -> "Masks":
        """Keep the weights that both keep. A parameter with only one mask keeps that mask."""
        both = self._masks | dict(other)
        for name in self._masks.keys() & other.keys():
            if self[name].shape != other[name].shape:
                raise ValueError(
                    f"the masks of {name!r} have shapes {tuple(self[name].shape)} and {tuple(other[name].shape)}."
                )
            both[name] = self[name] & other[name].to(self[name].device)
        return Masks(both)

    @property
    def total(self) -> int:
        """Number of weights that the masks cover."""
        return sum(mask.numel() for mask in self.values())

    @property
    def kept(self) -> int:
        """Number of kept weights."""
        return sum(int(mask.sum()) for mask in self.values())

    @property
    def sparsity(self) -> float:
        """The share of removed weights; 0 for empty masks."""
        return 1 - self.kept / self.total if self.total else 0.0

    def parameters(self, model: nn.Module) -> dict[str, nn.Parameter]:
        """The model's parameter for each mask; also if torch's own pruning has renamed ``weight`` to ``weight_orig``.

        Raises:
            ValueError: The model has no such parameter, or one of another shape.
        """
        known = dict(model.named_parameters(remove_duplicate=False))
        found = {}
        for name, mask in self.items():
            parameter = known.get(name, known.get(f"{name}_orig"))
            if parameter is None:
                raise ValueError(f"the masks name {name!r}, which {type(model).__name__} does not have.")
            if parameter.shape != mask.shape:
                raise ValueError(
                    f"the mask of {name!r} has shape {tuple(mask.shape)}, the parameter {tuple(parameter.shape)}: "
                    "the masks belong to another model."
                )
            found[name] = parameter
        return found

    def apply_(self, model: nn.Module) -> None:
        """Set every removed weight to zero, in place. Nothing changes if any mask does not fit."""
        parameters = self.parameters(model)
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.masked_fill_(~self[name].to(parameter.device), 0)

    def hold(self, model: nn.Module, optimizer: Optimizer | None = None) -> "Hold":
        """Zero the removed weights and keep them zero during training, also against momentum and weight decay.

        Gradients of removed weights are zeroed when they are computed, and the weights after each step of
        ``optimizer``. Every optimizer state of their shape is zeroed at once, and then stays zero. Without an optimizer
        the weights are zeroed before each forward pass. ``release()`` ends this; the zeros are then ordinary weights
        that further training can change.

        Example::

            with pruned.masks.hold(model, optimizer):
                train(model, optimizer)     # fine-tuning
        """
        return Hold(self, model, optimizer)

    def to_torch_prune(self, model: nn.Module) -> None:
        """Pass the masks to ``torch.nn.utils.prune``: ``weight`` becomes ``weight_orig`` and ``weight_mask``."""
        for name, parameter in self.parameters(model).items():
            owner, _, own = name.rpartition(".")
            mask = self[name].to(parameter.device)
            torch_prune.custom_from_mask(model.get_submodule(owner), own, mask)  # type: ignore[no-untyped-call]

    @classmethod
    def from_torch_prune(cls, model: nn.Module) -> "Masks":
        """The masks that ``torch.nn.utils.prune`` holds on the model, under the parameters' original names.

        Raises:
            ValueError: There are none.
        """
        masks = {
            name.removesuffix("_mask"): buffer.detach() != 0
            for name, buffer in model.named_buffers()
            if name.endswith("_mask") and f"{name.removesuffix('_mask')}_orig" in dict(model.named_parameters())
        }
        if not masks:
            raise ValueError(f"{type(model).__name__} holds no masks of torch.nn.utils.prune.")
        return cls(masks)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write one safetensors file with one bit per weight."""
        packed = {
            name: {"shape": list(mask.shape), "bits": torch.from_numpy(np.packbits(mask.cpu().numpy().reshape(-1)))}
            for name, mask in self.items()
        }
        save_state(path, {"format": _FORMAT, "version": _VERSION, "masks": packed})

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Masks":
        """Read what :meth:`save` wrote.

        Raises:
            ValueError: The file is damaged, holds no masks, or has a later version.
        """
        state = load_state(path)
        if not isinstance(state, dict) or state.get("format") != _FORMAT:
            raise ValueError(f"{path} does not hold masks; another program wrote it.")
        if state["version"] != _VERSION:
            raise ValueError(f"{path} has version {state['version']} of the format; this reads version {_VERSION}.")
        masks = {}
        for name, entry in state["masks"].items():
            count = int(np.prod(entry["shape"], dtype=np.int64))
            bits = entry["bits"].numpy()
            if len(bits) != (count + 7) // 8:
                raise ValueError(f"{path} is damaged: the mask of {name!r} does not fit its shape {entry['shape']}.")
            masks[name] = torch.from_numpy(np.unpackbits(bits, count=count).astype(bool)).reshape(entry["shape"])
        return cls(masks)


class Hold:
    """Masks that are held on a model until :meth:`release`; see :meth:`shaver.pruning.Masks.hold`.

    Attributes:
        masks: The current masks.
    """

    def __init__(self, masks: Masks, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        self.masks = masks
        self._model, self._optimizer = model, optimizer
        self._parameters = masks.parameters(model)
        self._handles: list[Any] = []
        self.apply_()
        for name, parameter in self._parameters.items():
            if parameter.requires_grad:
                hook = partial(lambda name, parameter: self._zero(name, parameter.grad), name)
                self._handles.append(parameter.register_post_accumulate_grad_hook(hook))  # type: ignore[no-untyped-call]
        if optimizer is not None:
            self._handles.append(optimizer.register_step_post_hook(lambda *_: self._after_step()))
        else:
            self._handles.append(model.register_forward_pre_hook(lambda *_: self.apply_()))

    def apply_(self) -> None:
        """Zero the removed weights, their gradients, and every optimizer state of their shape."""
        for name, parameter in self._parameters.items():
            self._zero(name, parameter.grad)
            state: Mapping[str, Any] = self._optimizer.state.get(parameter, {}) if self._optimizer is not None else {}
            for value in state.values():
                if isinstance(value, Tensor) and value.shape == parameter.shape:
                    self._zero(name, value)
        self._after_step()

    def _after_step(self) -> None:
        """Zero the removed weights. Their optimizer states are zero already, because their gradients were."""
        for name, parameter in self._parameters.items():
            self._zero(name, parameter.data)

    def update(self, masks: Masks) -> None:
        """Replace the masks by others for the same parameters. Nothing changes if they do not fit.

        Raises:
            ValueError: The new masks have other parameters or shapes.
        """
        if set(masks) != set(self.masks):
            raise ValueError("the new masks have other parameters than the current ones; call release(), then hold().")
        masks.parameters(self._model)
        self.masks = masks
        self.apply_()

    def release(self) -> None:
        """Stop holding: the zeros become ordinary weights. May be called twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def _zero(self, name: str, values: Tensor | None) -> None:
        if values is None:
            return
        with torch.no_grad():  # half the time of masked_fill_, which was a quarter of a training step
            torch.where(self.masks[name].to(values.device), values, values.new_zeros(()), out=values)

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *error: object) -> None:
        self.release()
