"""Random networks: the compact network computes what the masked one does, or the removal is refused in words."""

import pytest

from tests.structure.random_networks import compare

#: A longer run by hand: python benchmarks/random_compactions.py --networks 1000
DRAWS = 160


@pytest.mark.parametrize("part", range(4))
def test_compact_equals_masked_or_is_refused_in_words(part: int) -> None:
    outcomes = [compare(seed) for seed in range(part, DRAWS, 4)]
    assert [outcome for outcome in outcomes if outcome.kind in ("wrong", "crashed")] == []
    assert sum(outcome.kind == "equal" for outcome in outcomes) > len(outcomes) / 3
