"""Data sets by name, split, normalised with all their training data, and ready to batch."""

import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal, TypedDict, Unpack, overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shaver.data import sources
from shaver.data.augmentation import FlipCrop
from shaver.data.imdb import Reviews
from shaver.data.locate import DataSource
from shaver.data.memory import InMemory
from shaver.data.sources import Arrays
from shaver.naming import check_count, check_name, require


@dataclass(frozen=True)
class Splits:
    """A data set split into training, validation and test parts.

    Attributes:
        name: The data set's name.
        train: The training part, with augmentation if requested.
        valid: The validation part, taken from the official training part; ``None`` without ``valid_fraction``.
        test: The test part.
        classes: Number of classes.
        input_shape: The shape of one input.
    """

    name: str
    train: InMemory
    valid: InMemory | None
    test: InMemory
    classes: int
    input_shape: tuple[int, ...]


@dataclass(frozen=True)
class Texts:
    """Raw texts and their labels. Real data sets are sorted by label: shuffle them before training."""

    texts: list[str]
    targets: Tensor

    def __len__(self) -> int:
        return len(self.texts)

    def __repr__(self) -> str:
        return f"Texts({len(self)} texts)"


@dataclass(frozen=True)
class TextSplits:
    """A split data set of texts; the attributes are those of :class:`Splits`."""

    name: str
    train: Texts
    valid: Texts | None
    test: Texts
    classes: int


#: Inputs and labels.
_Samples = tuple[NDArray[np.generic], NDArray[np.generic]]


@dataclass(frozen=True)
class _Images:
    """What :func:`load` needs to know about a data set of tensors."""

    classes: int
    shape: tuple[int, ...]
    source: DataSource[Arrays] | Callable[[], _Samples]  # files, or a function for all samples, which are split here
    augment: FlipCrop | None


class _Options(TypedDict, total=False):
    """The keyword arguments of :func:`load`."""

    root: str | os.PathLike[str] | None
    seed: int
    valid_fraction: float
    augment: bool
    download: bool


def names() -> tuple[str, ...]:
    """The names that :func:`load` accepts."""
    return (*_IMAGES, "imdb")


@overload
def load(name: Literal["imdb"], **options: Unpack[_Options]) -> TextSplits: ...  # type: ignore[overload-overlap]
@overload
def load(name: str, **options: Unpack[_Options]) -> Splits: ...
def load(
    name: str,
    *,
    root: str | os.PathLike[str] | None = None,
    seed: int = 0,
    valid_fraction: float = 0.0,
    augment: bool = False,
    download: bool = True,
) -> Splits | TextSplits:
    """Load a data set by its name.

    Example:
        >>> digits = load("digits", valid_fraction=0.1)
        >>> for x, y in digits.train.batches(128, shuffle=True, seed=0): ...

    ``"cancer"`` and ``"digits"`` come with scikit-learn. For the others, ``root`` is searched. Without ``root``, the
    folder in the environment variable ``SHAVER_DATA`` is searched, then the user's cache folder. A data set that is not
    found is downloaded into ``root`` or the cache.

    Args:
        name: One of :func:`names`.
        root: The folder with the data sets. A missing data set is downloaded into it.
        seed: Seed of the validation split, and of the 80/20 split of ``"cancer"`` and ``"digits"``.
        valid_fraction: Share of the training data for validation. Inputs are standardised with the mean and standard
            deviation of both parts together, so they do not depend on this share.
        augment: Whether to shift training images randomly, and to mirror them where the meaning stays the same: up to
            4 pixels and mirrored for CIFAR and FashionMNIST, up to 2 pixels for MNIST and 1 for digits.
        download: Whether a missing data set may be downloaded.

    Returns:
        :class:`Splits`; for ``"imdb"``, which is text, :class:`TextSplits`.

    Raises:
        ValueError: The name is unknown, the fraction is impossible, or a file is damaged.
        FileNotFoundError: The data set was not found and could not be downloaded.
        ImportError: A package of the extra ``data`` is missing.
    """
    check_name("data set", name, names())
    if not 0 <= valid_fraction < 1:
        raise ValueError(f"valid_fraction must be at least 0 and below 1, not {valid_fraction!r}.")
    check_count("seed", seed, 0)
    kind = _IMAGES.get(name)
    if augment and (kind is None or kind.augment is None):
        able = ", ".join(repr(other) for other, entry in _IMAGES.items() if entry.augment is not None)
        raise ValueError(f"{name!r} has no images to augment; augment=True works for {able}.")
    if kind is None:
        return _split_texts(*sources.IMDB.read(root, download), seed, valid_fraction)
    source = kind.source
    raw = source.read(root, download) if isinstance(source, DataSource) else _split(*source(), seed)
    train_inputs, train_targets, test_inputs, test_targets = (torch.from_numpy(array) for array in raw)
    for part, inputs in (("train", train_inputs), ("test", test_inputs)):
        if tuple(inputs.shape[1:]) != kind.shape:
            raise ValueError(
                f"{name!r} has inputs of shape {kind.shape}, but the {part} file holds {tuple(inputs.shape[1:])}."
            )
    mean, std = _moments(train_inputs)
    kept, held_out = _hold_out(len(train_inputs), valid_fraction, seed)
    make = partial(InMemory, mean=mean, std=std, classes=kind.classes)
    try:
        return Splits(
            name=name,
            train=make(train_inputs[kept], train_targets[kept], augment=kind.augment if augment else None),
            valid=None if held_out is None else make(train_inputs[held_out], train_targets[held_out]),
            test=make(test_inputs, test_targets),
            classes=kind.classes,
            input_shape=kind.shape,
        )
    except ValueError as error:
        raise ValueError(f"the files of {name!r} are damaged or belong to another data set: {error}") from error


def _split_texts(train: Reviews, test: Reviews, seed: int, valid_fraction: float) -> TextSplits:
    texts, labels = train
    kept, held_out = _hold_out(len(texts), valid_fraction, seed)

    def part(index: Tensor | slice) -> Texts:
        return Texts([texts[i] for i in torch.arange(len(texts))[index].tolist()], torch.tensor(labels)[index])

    valid = None if held_out is None else part(held_out)
    return TextSplits("imdb", part(kept), valid, Texts(test[0], torch.tensor(test[1])), classes=2)


def _hold_out(size: int, fraction: float, seed: int) -> tuple[Tensor | slice, Tensor | None]:
    """The indices of the training and of the validation part, in stored order; all and ``None`` for a fraction of 0."""
    if fraction == 0:
        return slice(None), None
    count = round(size * fraction)
    if not 0 < count < size:
        raise ValueError(f"valid_fraction={fraction} of {size} training samples leaves one of the two parts empty.")
    order = torch.randperm(size, generator=torch.Generator().manual_seed(seed))
    return order[count:].sort().values, order[:count].sort().values


def _moments(inputs: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and standard deviation per channel or feature, in float64; for pixels in units of 0…1.

    Pixels are counted by value, which is exact and needs no copy of the images as floats. The deviation of a constant
    is set to 1.
    """
    if inputs.dtype == torch.uint8:
        counts = torch.stack([torch.bincount(c.reshape(-1), minlength=256) for c in inputs.unbind(1)]).double()
        weights, values = counts / counts.sum(1, keepdim=True), torch.arange(256, dtype=torch.float64) / 255
        mean = weights @ values
        std = (weights * (values - mean.unsqueeze(1)).square()).sum(1).sqrt()
    else:
        mean, std = inputs.double().mean(0), inputs.double().std(0, correction=0)
    return mean, torch.where(std > 0, std, 1.0)


def _read_cancer() -> _Samples:
    features, labels = require("sklearn.datasets", "the data", "data").load_breast_cancer(return_X_y=True)
    return features.astype(np.float32), labels


def _read_digits() -> _Samples:
    pixels, labels = require("sklearn.datasets", "the data", "data").load_digits(return_X_y=True)
    return pixels.astype(np.uint8).reshape(-1, 1, 8, 8), labels


def _split(inputs: NDArray[np.generic], labels: NDArray[np.generic], seed: int) -> Arrays:
    """80 % of the samples for training and 20 % for testing, by a permutation drawn from the seed."""
    order = torch.randperm(len(inputs), generator=torch.Generator().manual_seed(seed)).numpy()
    train, test = order[: round(0.8 * len(order))], order[round(0.8 * len(order)) :]
    return inputs[train], labels[train], inputs[test], labels[test]


_IMAGES: dict[str, _Images] = {
    "cancer": _Images(2, (30,), _read_cancer, None),
    "digits": _Images(10, (1, 8, 8), _read_digits, FlipCrop(pad=1, flip=False)),
    "mnist": _Images(10, (1, 28, 28), sources.MNIST, FlipCrop(pad=2, flip=False)),
    "fashion": _Images(10, (1, 28, 28), sources.FASHION, FlipCrop(pad=4)),
    "cifar10": _Images(10, (3, 32, 32), sources.CIFAR10, FlipCrop(pad=4)),
    "cifar100": _Images(100, (3, 32, 32), sources.CIFAR100, FlipCrop(pad=4)),
}
