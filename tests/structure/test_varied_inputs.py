"""Groups and the check of a removal do not depend on a lucky example."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.measure.example import call
from shaver.structure import CompactionError, compact
from shaver.structure.inputs import VariedInputs, check_example
from tests.structure.compact_cases import GroupedQueries, numbers, shaken


class FixedHeads(nn.Module):
    """Attention that keeps its number of heads when it loses some of their width."""

    def __init__(self, tokens: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 24) if tokens else nn.Identity()
        self.q, self.k, self.v, self.o = (nn.Linear(24, 24) for _ in range(4))
        self.head = nn.Linear(24, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        q, k, v = (f(x).unflatten(-1, (4, -1)).transpose(1, 2) for f in (self.q, self.k, self.v))
        mixed = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        out: Tensor = self.head((x + self.o(mixed)).mean(1))
        return out


@pytest.mark.parametrize(
    "example",
    [
        torch.zeros(1, 16, dtype=torch.int64),
        torch.zeros(1, 1, dtype=torch.int64),
        torch.zeros(2, 5, 24, dtype=torch.float64),
        torch.ones(1, 1, 24, dtype=torch.float64),
    ],
    ids=["equal tokens", "one token", "zeros", "one vector"],
)
def test_an_example_without_variety_does_not_hide_what_heads_do(example: Tensor) -> None:
    """Equal or single tokens make attention weights constant, whatever the heads are."""
    model = shaken(FixedHeads(tokens=not example.is_floating_point()))
    with pytest.raises(CompactionError, match="register_surgery"):
        compact(model, example, criterion="magnitude", sparsity=0.5)


class OneOrMany(FixedHeads):
    """Takes one vector per sample as well as a sequence of them."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.unsqueeze(1) if x.ndim == 2 else x)


@pytest.mark.parametrize("samples", [1, 4])
def test_an_example_of_one_vector_does_not_hide_what_sequences_show(samples: int) -> None:
    model = shaken(OneOrMany(tokens=False))
    with pytest.raises(CompactionError, match="register_surgery"):
        compact(model, numbers(samples, 24), criterion="magnitude", sparsity=0.5)


def test_a_length_that_equals_the_channels_is_no_sequence() -> None:
    """Batch norm reads (samples, channels, positions) too: three positions of three channels run by chance."""
    model = shaken(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3), nn.ReLU(), nn.Linear(3, 3)))
    small = compact(model, numbers(4, 3), criterion="magnitude", sparsity=0.3)
    assert small[0].out_features == 2


def test_a_network_that_follows_its_widths_is_compacted_from_one_equal_token() -> None:
    model = shaken(GroupedQueries())
    small = compact(model, torch.zeros(1, 1, 10, dtype=torch.float64), criterion="magnitude", sparsity=0.5)
    assert small.q.out_features == 12


def drawn(model: nn.Module, example: Any) -> Any:
    inputs = VariedInputs(model, call, check_example(example)).draw(0)
    assert inputs is not None
    return inputs


def test_tokens_are_drawn_within_the_embedding_that_reads_them() -> None:
    found = drawn(nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2)), torch.zeros(1, 300, dtype=torch.int64))
    assert found.shape == (2, 300)
    assert set(found.unique().tolist()) == set(range(7))


def test_tokens_that_the_network_copies_first_are_drawn_too() -> None:
    class Copies(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(7, 4)

        def forward(self, ids: Tensor) -> Tensor:
            out: Tensor = self.embed(ids.clone())
            return out

    assert drawn(Copies(), torch.ones(2, 40, dtype=torch.int64)).unique().numel() == 7


def test_values_are_drawn_within_the_range_of_the_example() -> None:
    found = drawn(nn.Linear(6, 2), torch.rand(40, 6) + 3)
    assert 3 <= found.min() < 3.5 < found.max() <= 4
    assert found.std(0).min() > 0


def test_masks_and_what_no_embedding_reads_stay_as_they_are() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(3, 2)

        def forward(self, x: Tensor, attention_mask: Tensor, keep: Tensor, count: Tensor) -> Tensor:
            out: Tensor = self.layer(x * attention_mask[..., None] * keep[..., None]) / count
            return out

    keep = torch.tensor([[0.0, 1.0, 1.0, 0.0], [1.0, 1.0, 1.0, 0.0]])
    example = {"x": torch.zeros(2, 4, 3), "attention_mask": torch.ones(2, 4), "keep": keep, "count": torch.tensor(4)}
    found = drawn(Masked(), example)
    assert found["x"].std() > 0
    assert torch.equal(found["attention_mask"], example["attention_mask"])
    assert torch.equal(found["keep"], keep)
    assert int(found["count"]) == 4


def test_a_network_that_takes_only_its_example_has_no_other_inputs() -> None:
    example = torch.arange(6.0).reshape(2, 3)

    class Only(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            if not torch.equal(x, example):
                raise ValueError("this one only")
            return x

    assert VariedInputs(Only(), call, example).draws(2) == []


def test_inputs_outside_a_networks_domain_are_not_used() -> None:
    class Logarithm(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.log()

    assert VariedInputs(Logarithm(), call, torch.ones(2, 3) / 2).draw(0).min() > 0


def test_the_users_example_is_not_changed_by_a_network_that_works_in_place() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> Tensor:
            x += 1
            out: Tensor = self.layers(x)
            return out

    example = numbers(2, 3).float()
    before = example.clone()
    drawn(InPlace(), example)
    small = compact(InPlace(), example, criterion="magnitude", sparsity=0.5)
    assert torch.equal(example, before)
    assert small.layers[0].out_features == 2
