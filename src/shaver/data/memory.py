"""Data sets in memory as one tensor, and their batches: slices by a seeded permutation.

Images stay uint8, a quarter of their size as floats, and are normalised to floats batch by batch. For MNIST at batch
size 128 that costs a few milliseconds more per epoch than storing floats. Nothing here uses the global random number
generator; the batches of an epoch depend only on ``(seed, epoch)``.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np
import torch
from torch import Tensor

from shaver.batches import IGNORED
from shaver.naming import check_count

#: A function that changes raw inputs ``(batch, …)`` and draws random numbers only from the given generator.
Augment = Callable[[Tensor, torch.Generator], Tensor]


class InMemory:
    """Inputs and targets as two tensors, normalised batch by batch.

    Example:
        >>> data = InMemory(torch.randint(0, 256, (500, 1, 28, 28), dtype=torch.uint8), torch.randint(0, 10, (500,)))
        >>> x, y = data[:32]                      # also an index tensor, a list, or one integer for one sample
        >>> for x, y in data.batches(128, shuffle=True, seed=0): ...

    It is also a normal torch data set, so ``DataLoader(data, batch_size=128)`` works. That is slow, because it reads
    sample by sample, and it does not augment; :meth:`batches` does.

    Args:
        inputs: ``(samples, …)``. uint8 values are images or features in 0…255 and become floats in 0…1, of the default
            dtype at construction. Floats keep their dtype. Other integers (token numbers) do not change.
        targets: Class labels (integers) or real values, one row per sample.
        mean: Subtracted from the inputs: one number, or one per entry of dimension 1 (channel or feature). For uint8
            inputs it is in units of 0…1.
        std: Divides the inputs afterwards; same shape and units as ``mean``.
        augment: Applied to the raw inputs of a batch before they are normalised, for example :class:`FlipCrop`.
        classes: Number of classes; other labels are refused.
    """

    def __init__(
        self,
        inputs: Tensor,
        targets: Tensor,
        *,
        mean: Tensor | Sequence[float] | float | None = None,
        std: Tensor | Sequence[float] | float | None = None,
        augment: Augment | None = None,
        classes: int | None = None,
    ) -> None:
        _check_inputs(inputs)
        if len(targets) != len(inputs):
            raise ValueError(f"there are {len(inputs)} inputs but {len(targets)} targets; each input needs one.")
        if not targets.is_floating_point():
            targets = targets.long()
        _check_targets(targets, classes)
        self.inputs, self.targets, self.augment, self.classes = inputs, targets, augment, classes
        real = inputs.is_floating_point() or inputs.dtype == torch.uint8
        if not real and (mean is not None or std is not None):
            raise ValueError(f"inputs of type {inputs.dtype} are indices and cannot be normalised; leave out mean/std.")
        self._dtype = torch.get_default_dtype() if inputs.dtype == torch.uint8 else inputs.dtype
        self.mean = None if mean is None else _constants("mean", mean, inputs)
        self.std = None if std is None else _constants("std", std, inputs)
        if self.std is not None and not bool((self.std > 0).all()):
            raise ValueError(
                f"std must be positive everywhere, not {self.std.flatten().tolist()}; use 1 for a constant."
            )
        # x = (u/range − mean)/std = u·scale + shift, with the two constants rounded once.
        scale = torch.tensor(1 / 255 if inputs.dtype == torch.uint8 else 1.0, dtype=torch.float64)
        divisor = torch.tensor(1.0, dtype=torch.float64) if self.std is None else self.std.cpu()
        self._identity = not real or (inputs.dtype != torch.uint8 and mean is None and std is None)
        self._scale = (scale / divisor).to(inputs.device, self._dtype)
        self._shift = None if self.mean is None else (-self.mean.cpu() / divisor).to(inputs.device, self._dtype)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int | slice | Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """The normalised inputs and the targets at ``index``; an integer gives one sample without batch dimension."""
        raw, targets = self._take(index)
        return self._normalise(raw), targets

    @property
    def input_shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.inputs.shape[1:])

    def batches(
        self,
        batch_size: int,
        *,
        shuffle: bool = False,
        seed: int = 0,
        epoch: int = 0,
        drop_last: bool = False,
        augment: bool = True,
    ) -> "Batches":
        """Batches to iterate over, once per epoch.

        Args:
            batch_size: Samples per batch.
            shuffle: Whether to shuffle the samples in each epoch. Default: stored order.
            seed: Seed of the order and the augmentation.
            epoch: The first epoch; see :class:`Batches`.
            drop_last: Whether to leave out a smaller last batch.
            augment: Whether to apply the data set's augmentation, if it has one.
        """
        return Batches(self, batch_size, shuffle=shuffle, seed=seed, epoch=epoch, drop_last=drop_last, augment=augment)

    def _take(self, index: int | slice | Sequence[int] | Tensor) -> tuple[Tensor, Tensor]:
        """Copies of the raw inputs and the targets, so that changing them in place does not change the data set."""
        if isinstance(index, slice | int):
            return self.inputs[index].clone(), self.targets[index].clone()
        where = torch.as_tensor(index, device=self.inputs.device)
        if where.dtype == torch.bool or where.ndim == 0:
            return self.inputs[where].clone(), self.targets[where].clone()
        where = torch.where(where < 0, where + len(self), where)
        return self.inputs.index_select(0, where), self.targets.index_select(0, where)

    def _normalise(self, raw: Tensor) -> Tensor:
        if self._identity:
            return raw
        inputs = raw.to(self._dtype).mul_(self._scale)  # in place: raw is a copy already
        return inputs if self._shift is None else inputs.add_(self._shift)

    def __repr__(self) -> str:
        classes = "" if self.classes is None else f", {self.classes} classes"
        return f"InMemory({len(self)} inputs of shape {self.input_shape}, {self.inputs.dtype}{classes})"


@dataclass(eq=False)
class Batches:
    """The batches of an :class:`InMemory` data set. Each loop ``for x, y in batches`` is one epoch.

    The order and the augmentation of an epoch depend only on ``(seed, epoch)``. Each ``iter`` moves on to the next
    epoch. :meth:`set_epoch` selects any epoch, so that a resumed run sees the same batches as an uninterrupted one.

    Attributes:
        dataset: The data set, so that ``len(batches.dataset)`` works as for a ``DataLoader``.
        epoch: The epoch of the next ``iter``.

    The other attributes are the arguments of :meth:`InMemory.batches`.
    """

    dataset: InMemory
    batch_size: int
    _: KW_ONLY
    shuffle: bool = False
    seed: int = 0
    epoch: int = 0
    drop_last: bool = False
    augment: bool = True

    def __post_init__(self) -> None:
        check_count("batch_size", self.batch_size)
        if self.drop_last and self.batch_size > len(self.dataset):
            raise ValueError(
                f"drop_last with batch_size {self.batch_size} leaves no batch: there are only {len(self.dataset)} "
                "samples."
            )
        check_count("seed", self.seed, 0)
        self.set_epoch(self.epoch)

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next ``iter``."""
        self.epoch = check_count("epoch", epoch, 0)

    @property
    def data_size(self) -> int:
        """N, the number of samples in the data set, also with ``drop_last``: each epoch leaves out different ones."""
        return len(self.dataset)

    def __len__(self) -> int:
        full, rest = divmod(len(self.dataset), self.batch_size)
        return full + (rest > 0 and not self.drop_last)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        epoch, self.epoch = self.epoch, self.epoch + 1
        return self._epoch(epoch)

    def _epoch(self, epoch: int) -> Iterator[tuple[Tensor, Tensor]]:
        size, data = self.batch_size, self.dataset
        augment = data.augment if self.augment else None
        order = None
        if self.shuffle:
            order = torch.randperm(len(data), generator=_generator(self.seed, epoch, 0)).to(data.inputs.device)
        generator = _generator(self.seed, epoch, 1)  # separate, so that augmentation does not change the order
        for start in range(0, len(self) * size, size):
            part = slice(start, start + size)
            raw, targets = data._take(part if order is None else order[part])
            if augment is not None:
                raw = augment(raw, generator)
            yield data._normalise(raw), targets

    def __repr__(self) -> str:
        order = "shuffled" if self.shuffle else "in order"
        return f"Batches({len(self)} of {self.batch_size}, {order}, seed {self.seed}, {self.dataset!r})"


def _generator(*key: int) -> torch.Generator:
    """A generator with an independent stream per key, also for neighbouring seeds and epochs."""
    (state,) = np.random.SeedSequence(key).generate_state(1, np.uint64)
    return torch.Generator().manual_seed(int(state))


def _constants(kind: str, value: Tensor | Sequence[float] | float, inputs: Tensor) -> Tensor:
    """``value`` in float64, shaped to broadcast over the dimensions after the channels."""
    tensor = torch.as_tensor(value, dtype=torch.float64).flatten()
    if tensor.numel() not in (1, inputs.shape[1]):
        raise ValueError(
            f"{kind} has {tensor.numel()} numbers, but inputs of shape {tuple(inputs.shape[1:])} need one, or "
            f"{inputs.shape[1]} (one per entry of their first dimension)."
        )
    if not bool(tensor.isfinite().all()):
        raise ValueError(f"{kind} must be finite, not {tensor.tolist()}.")
    return tensor.reshape(-1, *(1,) * (inputs.ndim - 2))


def _check_inputs(inputs: Tensor) -> None:
    shape = tuple(inputs.shape)
    if inputs.ndim < 2:
        raise ValueError(f"inputs need the shape (samples, …), at least two dimensions, not {shape}.")
    if inputs.numel() == 0:
        raise ValueError(f"the data set is empty: its inputs have shape {shape}.")
    if inputs.dtype == torch.uint8 and inputs.ndim == 3:
        raise ValueError(f"images need the shape (samples, channels, height, width), not {shape}; use unsqueeze(1).")
    if inputs.dtype == torch.uint8 and inputs.ndim == 4 and shape[3] in (1, 3) and shape[1] not in (1, 3):
        raise ValueError(f"images of shape {shape} have their channels last; use permute(0, 3, 1, 2).")
    _check_finite("inputs", inputs)


def _check_targets(targets: Tensor, classes: int | None) -> None:
    _check_finite("targets", targets)
    if classes is None:
        return
    if targets.is_floating_point():
        raise ValueError(f"labels of {classes} classes are integers, not {targets.dtype}.")
    wrong = (targets != IGNORED) & ((targets < 0) | (targets >= classes))
    if bool(wrong.any()):
        where = int(wrong.reshape(len(targets), -1).any(1).nonzero()[0])
        raise ValueError(
            f"label {int(targets[wrong][0])} of sample {where} is out of range: with {classes} classes labels run "
            f"from 0 to {classes - 1} (or {IGNORED}, ignored)."
        )


def _check_finite(kind: str, values: Tensor) -> None:
    if not values.is_floating_point():
        return
    low, high = torch.aminmax(values)  # NaN or infinity if there is any, without a copy of the data
    if not bool((high - low).isfinite()) and not bool(values.isfinite().all()):
        wrong = (~values.isfinite()).reshape(len(values), -1).any(1).nonzero().flatten()
        raise ValueError(
            f"the {kind} hold NaN or infinity in {len(wrong)} of {len(values)} samples, first in sample "
            f"{int(wrong[0])}; remove or fill them."
        )
