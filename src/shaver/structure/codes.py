"""Few tests for many channels: which of n channels arrive at a position, from about 2 log₂ n runs instead of n."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def code(channels: int) -> list[list[Tensor]]:
    """Digits of the channel numbers; for each digit one mask a value.

    The radices are the prime factors of ``channels``, once from the smallest and once from the largest, so that
    channels that go together in even blocks, such as those of a head, have some digits in common and run through all
    values of the others. Numbers with a large prime factor are written in binary.

    Example:
        >>> [[mask.int().tolist() for mask in digit] for digit in code(4)]
        [[[1, 0, 1, 0], [0, 1, 0, 1]], [[1, 1, 0, 0], [0, 0, 1, 1]]]
    """
    number = torch.arange(channels)
    factors = _factors(channels)
    orders = {tuple(factors), tuple(reversed(factors))}
    if factors and factors[-1] > 64:
        orders = {(2,) * math.ceil(math.log2(channels))}
    digits = []
    for order in sorted(orders):
        rest = number
        for radix in order:
            digits.append([rest % radix == value for value in range(radix)])
            rest = rest // radix
    return digits or [[torch.ones(channels, dtype=torch.bool)]]


def decode(digits: Sequence[Sequence[Tensor]], hits: Sequence[Sequence[Tensor]]) -> Tensor:
    """``(channels, positions)``: which channels may arrive at which positions.

    Exact for positions that one channel reaches, or an even block of channels, or all; for other sets of channels it
    may name more than there are, never fewer.

    Args:
        digits: From :func:`code`.
        hits: For every mask in ``digits``, the positions that were reached when its channels were spoiled.
    """
    # Positions with the same answers, such as the tensors of one norm, are decoded once.
    answers = torch.stack([hit for reached in hits for hit in reached])
    distinct, which = torch.unique(answers.to(torch.uint8), dim=1, return_inverse=True)
    rows = iter(distinct.bool())
    possible = torch.ones(len(digits[0][0]), distinct.shape[1], dtype=torch.bool)
    for masks in digits:
        here = torch.zeros_like(possible)
        for mask in masks:
            here |= mask[:, None] & next(rows)[None, :]
        possible &= here
    return possible[:, which]


def _factors(number: int) -> list[int]:
    factors, prime = [], 2
    while number > 1:
        while number % prime == 0:
            factors.append(prime)
            number //= prime
        prime += 1
        if prime * prime > number > 1:
            factors.append(number)
            break
    return sorted(factors)
