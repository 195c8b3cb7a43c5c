"""Few tests for many channels: which of n channels arrive at a position, from about 2 log₂ n runs instead of n."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor


def code(channels: int, *, more: bool = False) -> list[list[Tensor]]:
    """Digits of the channel numbers; for each digit one mask a value.

    The radices are the prime factors of ``channels`` in some order. Channels that go together in even blocks, such as
    those of a head, have some digits in common and run through all values of the others, if the block's size is a
    product of the first radices: so there are several orders. Numbers with a large prime factor are written in binary.

    Example:
        >>> [[mask.int().tolist() for mask in digit] for digit in code(4)]
        [[[1, 0, 1, 0], [0, 1, 0, 1]], [[1, 1, 0, 0], [0, 0, 1, 1]]]

    Args:
        channels: How many there are.
        more: The orders that, with those of the usual code, make every divisor of ``channels`` the size of a block.
    """
    factors = _factors(channels)
    usual = [tuple(factors), tuple(reversed(factors))]
    orders = dict.fromkeys(usual)
    if factors and factors[-1] > 64:
        orders = {} if more else {(2,) * math.ceil(math.log2(channels)): None}
    elif more:
        orders = dict.fromkeys(order for order in _chains(channels) if order not in usual)
    digits = []
    for order in orders:
        rest = torch.arange(channels)
        for radix in order:
            digits.append([rest % radix == value for value in range(radix)])
            rest = rest // radix
    return digits if digits or more else [[torch.ones(channels, dtype=torch.bool)]]


def decode(digits: Sequence[Sequence[Tensor]], hits: Sequence[Sequence[Tensor]]) -> Tensor:
    """``(channels, positions)``: which channels may arrive at which positions.

    Exact for positions that one channel reaches, or an even block of channels whose size the code knows, or all; for
    other sets of channels it may name more than there are, never fewer.

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


def _chains(number: int) -> list[tuple[int, ...]]:
    """Orders of the prime factors among whose partial products every divisor is."""
    orders: list[tuple[int, ...]] = []
    covered: set[int] = set()
    for divisor in range(1, number + 1):
        if number % divisor == 0 and divisor not in covered:
            order = (*_factors(divisor), *_factors(number // divisor))
            covered.update(math.prod(order[:end]) for end in range(len(order) + 1))
            orders.append(order)
    return orders
