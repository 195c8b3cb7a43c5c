"""Data sets in memory: cancer, digits, MNIST, FashionMNIST, CIFAR and IMDB, and batches of a user's own tensors.

>>> splits = shaver.data.load("digits", valid_fraction=0.1)
>>> for x, y in splits.train.batches(128, shuffle=True, seed=0): ...
"""

from shaver.data.augmentation import FlipCrop
from shaver.data.catalog import Splits, Texts, TextSplits, load, names
from shaver.data.memory import Batches, InMemory

__all__ = ["Batches", "FlipCrop", "InMemory", "Splits", "TextSplits", "Texts", "load", "names"]
