"""Codes that find many channels in few tests, and the components of what is tied together."""

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from shaver.structure.arrivals import code, decode
from shaver.structure.coupling import components


def answers(truth: Tensor, digits: list[list[Tensor]]) -> list[list[Tensor]]:
    """What the tests would show: a position is reached by a mask that has one of its channels."""
    return [[(truth & mask[:, None]).any(0) for mask in digit] for digit in digits]


@given(st.integers(1, 300))
@settings(max_examples=60, deadline=None)
def test_single_channels_are_found_exactly(channels: int) -> None:
    truth = torch.eye(channels, dtype=torch.bool)[:, torch.randperm(channels)]
    digits = code(channels)
    assert torch.equal(decode(digits, answers(truth, digits)), truth)


@given(st.sampled_from([2, 3, 4, 6, 8, 12]), st.sampled_from([4, 16, 64, 80, 96, 128]), st.sampled_from([1, 3]))
@settings(max_examples=25, deadline=None)
def test_heads_are_found_exactly(heads: int, width: int, packed: int) -> None:
    """The channels of a head, in one block or in one for each of queries, keys and values."""
    head = torch.arange(heads * width * packed) // width % heads
    truth = head[:, None] == torch.arange(heads)[None, :]
    digits = code(len(head)) + code(len(head), more=True)
    assert torch.equal(decode(digits, answers(truth, digits)), truth)


@given(st.integers(2, 40), st.integers(1, 30), st.integers(0, 10**6))
@settings(max_examples=60, deadline=None)
def test_no_channel_is_ever_missed(channels: int, positions: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    truth = torch.rand(channels, positions, generator=generator) < 0.2
    digits = code(channels)
    assert bool((decode(digits, answers(truth, digits)) | ~truth).all())


def test_the_number_of_tests_grows_slowly() -> None:
    for channels in (512, 768, 1009, 1280, 2304, 3840):
        assert sum(map(len, code(channels))) <= 50
        assert sum(map(len, code(channels, more=True))) <= 100


@given(st.integers(1, 40), st.lists(st.tuples(st.integers(0, 39), st.integers(0, 39)), max_size=40))
@settings(max_examples=80, deadline=None)
def test_components_are_those_of_the_graph(nodes: int, pairs: list[tuple[int, int]]) -> None:
    pairs = [(a % nodes, b % nodes) for a, b in pairs]
    edges = torch.tensor(pairs, dtype=torch.long).reshape(-1, 2).T
    sets = [{n} for n in range(nodes)]
    for a, b in pairs:
        joined = sets[a] | sets[b]
        for n in joined:
            sets[n] = joined
    assert components(edges, nodes).tolist() == [min(s) for s in sets]
