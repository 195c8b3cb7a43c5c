"""The inputs on which a network is probed and compared: the example, and varied inputs like it.

One example can hide a dependence: with equal tokens, or a single one, attention weights do not depend on queries and
keys. So inputs of the same kind are drawn: floating-point values within the example's range, integers within the
embedding that reads them. Masks stay as they are. Dimensions of size 1 are lengthened where the network allows it.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_flatten_with_path, tree_map_only, tree_unflatten

from shaver.batches import LABELS, Forward, tensors_in
from shaver.curvature.capture import copied, undisturbed
from shaver.measure.example import cycled

#: Samples of a drawn batch, and the length that a dimension of size 1 is given.
_SAMPLES, _LENGTH = 2, 3


def check_example(example: object, forward: Forward | None = None) -> Any:
    """An example as the network is called with it; a mapping becomes a dict."""
    if forward is not None and not callable(forward):
        raise TypeError(f"forward must be a function forward(model, batch), not {forward!r}.")
    for value in tensors_in(dict(example) if isinstance(example, Mapping) else example):
        if value.layout != torch.strided or value.is_meta:
            what = "on the meta device" if value.is_meta else "sparse"
            raise TypeError(f"an example of shape {tuple(value.shape)} is {what}; pass ordinary tensors.")
    if isinstance(example, Mapping):
        return {key: value for key, value in example.items() if key != LABELS or forward is not None}
    if isinstance(example, Tensor | tuple) or (forward is not None and example is not None):
        return example
    kind = f"{type(example).__module__}.{type(example).__name__}".removeprefix("builtins.")
    hint = "torch.from_numpy makes a tensor of it" if kind.startswith("numpy.") else "see forward= for other batches"
    raise TypeError(
        f"an example is a tensor, a tuple of positional or a dict of keyword arguments, not {kind}; {hint}."
    )


def short(example: Any, samples: int = _SAMPLES) -> Any:
    """The example with another number of samples, cyclically; entries of another length stay as they are."""
    size = next((len(value) for value in tensors_in(example) if value.ndim), 0)
    return cycled(example, size, samples)


class VariedInputs:
    """Draws inputs of an example's kind that the network accepts."""

    def __init__(self, model: nn.Module, forward: Callable[[nn.Module, Any], Any], example: Any) -> None:
        self._model, self._forward = model, forward
        self._base = example
        self._finite = self._accepts(example)
        self._vocabulary = self._embeddings(example)
        for larger in self._larger(example):
            if self._accepts(larger) == self._finite:
                self._base = larger

    def draw(self, seed: int, base: Any = None) -> Any | None:
        """Another input like ``base``, or None where the network refuses everything but the example itself."""
        generator = torch.Generator().manual_seed(seed)
        leaves, form = tree_flatten_with_path(self._base if base is None else base)
        for way in (_within, _shuffled):
            batch = tree_unflatten([self._other(path, value, way, generator) for path, value in leaves], form)
            if self._accepts(batch) == self._finite:
                return batch
        return None

    def draws(self, count: int) -> list[Any]:
        """Up to ``count`` inputs."""
        found = [self.draw(seed) for seed in range(count)]
        return [batch for batch in found if batch is not None]

    def sequences(self) -> list[Any]:
        """One input with several positions per sample, if the network also takes such inputs.

        Attention on one vector per sample has one position, and its weights depend on nothing. Two lengths must run:
        one alone may be taken for the number of channels.
        """
        most = max((value.ndim for value in tensors_in(self._base)), default=0)
        if not 0 < most < 3:
            return []

        def positions(length: int, value: Tensor) -> Tensor:
            return value.unsqueeze(1).repeat_interleave(length, 1) if value.ndim == most else value

        found = None
        for length in (_LENGTH + 2, _LENGTH):
            found = self.draw(0, tree_map_only(Tensor, partial(positions, length), self._base))
            if found is None:
                return []
        return [found]

    def _other(self, path: Any, value: Any, way: Callable[..., Tensor], generator: torch.Generator) -> Any:
        name = "".join(map(str, path))
        if not isinstance(value, Tensor) or not value.numel() or "mask" in name:
            return value
        if name in self._vocabulary:
            drawn = torch.randint(self._vocabulary[name], value.shape, generator=generator)
            return drawn.to(value.device, value.dtype)
        if not value.is_floating_point() or _is_mask(value):
            return value
        return way(value, generator).to(value.device, value.dtype)

    def _accepts(self, batch: Any) -> bool | None:
        """Whether the outputs are finite; None if the network does not take the batch."""
        try:
            with undisturbed(self._model), torch.no_grad():
                result = self._forward(self._model, copied(batch))
        except Exception:  # whatever the user's network raises
            return None
        return all(bool(value.isfinite().all()) for value in tensors_in(result) if value.is_floating_point())

    def _embeddings(self, example: Any) -> dict[str, int]:
        """Path of an integer tensor → the number of rows of the smallest embedding that reads it."""
        batch = copied(example)
        integers = {
            "".join(map(str, path)): value
            for path, value in tree_flatten_with_path(batch)[0]
            if isinstance(value, Tensor) and not value.is_floating_point() and value.dtype != torch.bool
        }
        lookups = _Lookups()
        try:
            with undisturbed(self._model), torch.no_grad(), lookups:
                self._forward(self._model, batch)
        except Exception:  # a network that does not run in such a mode is not varied in its integers
            return {}
        rows: dict[str, int] = {}
        for path, value in integers.items():
            same = [size for index, size in lookups.found if index.data_ptr() == value.data_ptr()]
            # A network may copy its inputs; zeros may then be taken for another embedding's, which is smaller at worst.
            same = same or [size for index, size in lookups.found if torch.equal(index, value)]
            if same:
                rows[path] = min(same)
        return rows

    def _larger(self, example: Any) -> Iterator[Any]:
        """The example with more samples, then also with each dimension of size 1 made longer."""
        yield short(example, _SAMPLES)
        most = max((value.ndim for value in tensors_in(example)), default=0)

        def longer(dim: int, value: Tensor) -> Tensor:
            return value.repeat_interleave(_LENGTH, dim) if value.ndim > dim and value.shape[dim] == 1 else value

        for dim in range(1, most):
            if any(value.ndim > dim and value.shape[dim] == 1 for value in tensors_in(self._base)):
                yield tree_map_only(Tensor, partial(longer, dim), self._base)


class _Lookups(TorchFunctionMode):
    """Records the indices of every embedding lookup, and the number of rows of the embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[Tensor, int]] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.embedding, torch.nn.functional.embedding, torch.nn.functional.embedding_bag):
            # torch.embedding takes the weight first, the functions of torch.nn.functional the indices.
            weight, index = sorted(args[:2], key=lambda value: not value.is_floating_point())
            self.found.append((index, len(weight)))
        return func(*args, **(kwargs or {}))


def _within(value: Tensor, generator: torch.Generator) -> Tensor:
    """Uniform in the example's range; around a value that is constant."""
    low, high = float(value.detach().min()), float(value.detach().max())
    if low == high:
        low, high = low - 1, high + 1
    return low + (high - low) * torch.rand(value.shape, generator=generator, dtype=torch.float64)


def _shuffled(value: Tensor, generator: torch.Generator) -> Tensor:
    """The example's own values in another order."""
    return value.detach().flatten()[torch.randperm(value.numel(), generator=generator)].reshape(value.shape)


def _is_mask(value: Tensor) -> bool:
    """Whether a floating-point tensor is a mask: zeros and ones, or zeros and −∞."""
    zero, one = value == 0, value == 1
    return bool(((zero | one).all() and zero.any() and one.any()) or not value.isfinite().all())
