"""From scores to masks: exact counts, stable ties, caps and minima, N:M."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shaver.pruning import Ranking
from shaver.pruning.ranking import n_of_m, share_out

LEVELS = [0.2, 0.4, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99]


def scores_of(seed=0, ties=False):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a": (7, 11), "b": (3, 4, 2, 2), "c": (5, 13)}
    scores = {n: torch.rand(s, generator=generator) for n, s in shapes.items()}
    return {n: (s * 4).floor() for n, s in scores.items()} if ties else scores


def flat(masks):
    return torch.cat([m.flatten() for m in masks.values()])


@pytest.mark.parametrize("ties", [False, True])
def test_the_global_mask_is_a_stable_sort_cut_at_the_exact_count(ties):
    scores = scores_of(ties=ties)
    values = np.concatenate([s.numpy().ravel() for s in scores.values()])
    order = np.argsort(values, kind="stable")
    for level, masks in zip(LEVELS, map(Ranking(scores).at, LEVELS), strict=True):
        expected = np.ones(len(values), dtype=bool)
        expected[order[: round(level * len(values))]] = False
        assert np.array_equal(flat(masks).numpy(), expected)


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_higher_sparsities_keep_a_subset_and_hit_the_total(scope):
    masks = list(map(Ranking(scores_of(ties=True), scope=scope).at, LEVELS))
    total = masks[0].total
    assert [m.kept for m in masks] == [total - round(level * total) for level in LEVELS]
    if scope == "global":
        assert all(not bool((flat(b) & ~flat(a)).any()) for a, b in itertools.pairwise(masks))


def test_uniform_takes_the_same_share_of_each_layer():
    scores = {"a": torch.rand(10, 10), "b": torch.rand(20, 10) + 100}
    masks = Ranking(scores, scope="layer").at(0.8)
    assert [int(m.sum()) for m in masks.values()] == [20, 40]
    masks = Ranking(scores).at(0.8)
    assert [int(m.sum()) for m in masks.values()] == [0, 60]
    kept = scores["b"].flatten()[masks["b"].flatten()]
    assert kept.min() > scores["b"].flatten()[~masks["b"].flatten()].max()


@pytest.mark.parametrize("scope", ["global", "layer"])
def test_caps_and_minima_hold_and_the_rest_falls_elsewhere(scope):
    scores = {"small": torch.rand(10), "large": torch.rand(1000) + 1}
    masks = Ranking(scores, scope=scope, cap=0.95, minimum=4).at(0.9)
    assert int(masks["small"].sum()) == 4
    assert masks.kept == 101
    best = scores["small"].sort(descending=True).values[:4].min()
    assert torch.equal(masks["small"], scores["small"] >= best)


def test_a_cap_protects_by_share():
    scores = {"weak": torch.rand(100), "strong": torch.rand(100) + 1}
    masks = Ranking(scores, cap=0.6).at(0.5)
    assert [int(m.sum()) for m in masks.values()] == [40, 60]


def test_what_is_out_of_reach_is_said():
    with pytest.raises(ValueError, match=r"0.95 is out of reach.*at most 0.9"):
        Ranking({"a": torch.rand(100)}, cap=0.9).at(0.95)


def test_infinite_scores_rank_and_protected_ones_are_never_taken_for_them():
    scores = {"a": torch.tensor([1.0, float("inf"), float("inf"), 2.0]), "b": torch.full((4,), float("inf"))}
    masks = Ranking(scores, minimum=1).removing(6)
    assert [int(m.sum()) for m in masks.values()] == [1, 1]


def test_half_precision_and_mixed_types_rank_together():
    scores = {"a": torch.tensor([1.0, 4.0]).bfloat16(), "b": torch.tensor([2.0, 3.0]).double()}
    masks = Ranking(scores).removing(3)
    assert masks["a"].tolist() == [False, True]
    assert masks["b"].tolist() == [False, False]


@pytest.mark.parametrize("bad", [-0.1, 1.0, 1, True, "high", None, float("nan")])
def test_sparsity_outside_the_range_is_refused(bad):
    with pytest.raises(ValueError, match=r"in \[0, 1\)"):
        Ranking({"a": torch.rand(4)}).at(bad)


def test_95_is_not_095():
    with pytest.raises(ValueError, match=r"95 % is 0.95"):
        Ranking({"a": torch.rand(4)}).at(95)


def test_nan_is_named_and_nothing_is_nothing():
    with pytest.raises(ValueError, match="1 scores of 'b' are NaN"):
        Ranking({"a": torch.rand(2), "b": torch.tensor([1.0, float("nan")])}).at(0.5)
    with pytest.raises(ValueError, match="no scores"):
        Ranking({}).at(0.5)


@pytest.mark.parametrize(("cap", "minimum"), [(0, 0), (1.5, 0), (1, -1), (1, 0.5)])
def test_limits_out_of_range(cap, minimum):
    with pytest.raises(ValueError, match=r"cap is|minimum, how many weights each layer keeps, must be an integer"):
        Ranking({"a": torch.rand(4)}, cap=cap, minimum=minimum).at(0.5)


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_sharing_out_is_exact_and_respects_every_limit(data):
    sizes = data.draw(st.lists(st.integers(1, 1000), min_size=1, max_size=6))
    limits = [data.draw(st.integers(0, size)) for size in sizes]
    count = data.draw(st.integers(0, sum(limits)))
    shares = share_out(count, sizes, limits)
    assert sum(shares) == count
    assert all(0 <= s <= limit for s, limit in zip(shares, limits, strict=True))
    free = [i for i in range(len(sizes)) if shares[i] < limits[i]]
    rates = [shares[i] / sizes[i] for i in free]
    slack = max([1 / sizes[i] for i in free], default=0)
    assert not rates or max(rates) - min(rates) <= 2 * slack + 1e-9


@pytest.mark.parametrize(("kept", "of"), [(2, 4), (1, 4), (1, 2), (4, 8)])
def test_n_of_m_keeps_the_best_of_each_group(kept, of):
    scores = torch.rand(6, 16)
    masks = n_of_m({"w": scores}, kept, of, {"w": 1})
    groups, values = masks["w"].reshape(6, -1, of), scores.reshape(6, -1, of)
    assert bool((groups.sum(-1) == kept).all())
    worst_kept = values.masked_fill(~groups, 9).amin(-1)
    best_fallen = values.masked_fill(groups, -9).amax(-1)
    assert bool((worst_kept > best_fallen).all())


def test_n_of_m_along_input_channels_with_a_short_last_group():
    masks = n_of_m({"conv": torch.rand(3, 6, 2, 2), "first": torch.rand(3, 1, 5, 5)}, 2, 4, {"conv": 1, "first": 1})
    assert bool((masks["conv"][:, :4].sum(1) == 2).all())
    assert bool((masks["conv"][:, 4:].sum(1) == 1).all())
    assert bool(masks["first"].all())


def test_n_of_m_along_the_first_dimension_and_ties_by_position():
    masks = n_of_m({"w": torch.ones(4, 3)}, 2, 4, {"w": 0})
    assert masks["w"].tolist() == [[False] * 3] * 2 + [[True] * 3] * 2
