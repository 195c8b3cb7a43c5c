"""Exactly so many units stay, the best ones, whatever the target is a share of."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from shaver.structure import ChoiceOptions, Chooser, Group, Groups, Slice
from shaver.structure.costs import Costs, parameters_left
from tests.structure.known_groups import cnn, fcn, one_each


def choose_units(model, groups, scores, sparsity=0.8, example=None, **options):
    return Chooser(model, groups, ChoiceOptions(**options), example).choose(scores, sparsity)


def rising(groups):
    """The last unit of each group is its best."""
    return {name: torch.arange(1.0, group.units + 1) for name, group in groups.items()}


def test_uniform_takes_the_same_share_of_each_group_and_the_lowest_scores():
    model, groups = fcn()
    chosen = choose_units(model, groups, rising(groups), 0.75)
    assert chosen.widths == {"0": (8, 2), "2": (12, 3)}
    assert chosen.kept["0"].tolist() == [False] * 6 + [True] * 2
    assert (chosen.requested, chosen.achieved) == (0.75, 0.75)
    assert "requested 0.7500, achieved 0.7500" in str(chosen)


def test_global_lets_widths_come_out_freely():
    model, groups = fcn()
    scores = {"0": torch.full((8,), 1e-3), "2": torch.arange(1.0, 13)}
    raw = choose_units(model, groups, scores, 0.5, spread="global", normalise="none", min_units=2)
    assert raw.widths == {"0": (8, 2), "2": (12, 8)}
    relative = choose_units(model, groups, scores, 0.5, spread="global", normalise="mean")
    # Relative to its mean each unit of "0" scores 1, the i-th of "2" i/6.5: six of "2" lie below, four tie at 1.
    assert relative.widths == {"0": (8, 4), "2": (12, 6)}


def test_price_ranks_by_what_a_unit_brings_for_each_parameter():
    model, groups = fcn()
    scores = {"0": torch.full((8,), 6 + 12.0), "2": torch.full((12,), 1.1 * (9 + 3.0))}
    # A unit of "0" has 5 + 1 + 12 = 18 parameters, one of "2" 8 + 1 + 3 = 12: per parameter 1.0 against 1.1.
    costs = Costs(model, groups, "parameters")
    assert (costs.price("0"), costs.price("2")) == (18, 12)
    options = {"target": "parameters", "spread": "global"}
    assert choose_units(model, groups, scores, 0.3, normalise="price", **options).widths["2"] == (12, 12)
    assert choose_units(model, groups, scores, 0.3, normalise="none", **options).widths["0"] == (8, 8)


@pytest.mark.parametrize("spread", ["uniform", "global"])
@given(sparsity=st.floats(0, 0.9), seed=st.integers(0, 100), floor=st.integers(1, 4))
@settings(max_examples=30, deadline=None)
def test_counts_are_exact_and_nested(spread, sparsity, seed, floor):
    model, groups = fcn()
    generator = torch.Generator().manual_seed(seed)
    scores = {name: torch.randint(0, 4, (g.units,), generator=generator).float() for name, g in groups.items()}  # ties
    limit = 1 - 2 * floor / 20
    if round(sparsity * 20) > round(limit * 20):
        with pytest.raises(ValueError, match="out of reach"):
            choose_units(model, groups, scores, sparsity, spread=spread, min_units=floor)
        return
    chosen = choose_units(model, groups, scores, sparsity, spread=spread, min_units=floor)
    kept = sum(after for _, after in chosen.widths.values())
    assert kept == 20 - round(sparsity * 20)
    assert min(after for _, after in chosen.widths.values()) >= floor
    again = choose_units(model, groups, scores, sparsity, spread=spread, min_units=floor)
    assert all(torch.equal(chosen.kept[name], again.kept[name]) for name in groups)
    for name in groups:  # nobody falls while a lower one of the same group stands
        if bool(chosen.kept[name].any()) and not bool(chosen.kept[name].all()):
            assert scores[name][chosen.kept[name]].min() >= scores[name][~chosen.kept[name]].max()


@pytest.mark.parametrize("spread", ["uniform", "global"])
@pytest.mark.parametrize("sparsity", [0.0, 0.2, 0.5, 0.8])
def test_a_share_of_parameters_is_reached_by_the_fewest_units(spread, sparsity):
    model, groups = cnn()
    dense = sum(p.numel() for p in model.parameters())
    assert parameters_left(model, groups, groups.whole) == dense
    chosen = choose_units(model, groups, rising(groups), sparsity, target="parameters", spread=spread)
    assert chosen.achieved >= sparsity
    assert chosen.achieved == 1 - parameters_left(model, groups, chosen.kept) / dense
    removed = sum(before - after for before, after in chosen.widths.values())
    if removed and spread == "uniform":
        fewer = choose_units(model, groups, rising(groups), (removed - 1) / 16, spread=spread)
        assert 1 - parameters_left(model, groups, fewer.kept) / dense < sparsity


def test_free_widths_miss_the_target_by_less_than_any_unit():
    model, groups = cnn()
    dense = sum(p.numel() for p in model.parameters())
    for sparsity in (0.1, 0.25, 0.4, 0.55, 0.7):
        chosen = choose_units(model, groups, rising(groups), sparsity, target="parameters", spread="global")
        assert chosen.achieved >= sparsity
        for name, keep in chosen.kept.items():
            if not bool(keep.all()):
                more = {**chosen.kept, name: keep | (torch.arange(len(keep)) == int((~keep).nonzero()[-1]))}
                assert 1 - parameters_left(model, groups, more) / dense < sparsity


def test_parameters_left_are_those_of_a_network_built_so():
    model, groups = cnn()
    kept = {"0": torch.arange(6) < 2, "5": torch.arange(10) < 3}
    small = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Linear(8, 3), nn.Linear(3, 3))
    assert parameters_left(model, groups, kept) == sum(p.numel() for p in small.parameters())


def test_widths_become_multiples_and_the_best_of_the_fallen_come_back():
    model, groups = fcn()
    chosen = choose_units(model, groups, rising(groups), 0.5, round_to=4)
    assert chosen.widths == {"0": (8, 4), "2": (12, 8)}
    assert chosen.kept["2"].nonzero().flatten().tolist() == list(range(4, 12))
    assert (chosen.requested, chosen.achieved) == (0.5, 0.4)
    wide = choose_units(model, groups, rising(groups), 0.5, round_to=16)  # wider than the groups are
    assert wide.widths == {"0": (8, 8), "2": (12, 12)}
    costly = choose_units(model, groups, rising(groups), 0.5, target="parameters", round_to=4)
    assert costly.achieved >= 0.5
    assert all(after % 4 == 0 for _, after in costly.widths.values())


def test_a_head_of_six_features_is_rounded_in_features():
    heads = Group("a", "heads", 8, (Slice("0.weight", 0, torch.arange(48).reshape(8, 6), "makes"),))
    chosen = choose_units(
        nn.Sequential(nn.Linear(3, 48)), Groups({"a": heads}), {"a": torch.arange(8.0)}, 0.6, round_to=4
    )
    assert chosen.widths["a"] == (8, 4)  # 3 heads are 18 features, 4 are 24


def test_fallen_units_stay_fallen_and_do_not_count_in_the_normalisation():
    model, groups = fcn()
    chooser = Chooser(model, groups, ChoiceOptions(spread="global"))
    among = {"0": torch.arange(8) >= 6, "2": torch.ones(12, dtype=torch.bool)}
    scores = {"0": torch.tensor([9.0] * 6 + [1.0, 1.0]), "2": torch.arange(1.0, 13)}
    chosen = chooser.choose(scores, 0.5, among)
    # Six are gone; four more go. The two left of "0" are at their group's mean, so four of "2" are lower.
    assert chosen.kept["0"].tolist() == [False] * 6 + [True] * 2
    assert chosen.widths["2"] == (12, 8)


@pytest.mark.parametrize("spread", ["uniform", "global"])
def test_spared_units_fall_last_and_in_their_own_order(spread):
    model, groups = fcn()
    spare = {"0": torch.arange(8) < 4, "2": torch.arange(12) < 6}  # the worst half
    chooser = Chooser(model, groups, ChoiceOptions(spread=spread, normalise="none"))
    half, quarter = (chooser.choose(rising(groups), sparsity, spare=spare).kept for sparsity in (0.5, 0.75))
    assert all(torch.equal(half[name], spare[name]) for name in groups)
    assert all(keep.any() and not bool((keep & ~spare[name]).any()) for name, keep in quarter.items())
    for name, keep in quarter.items():
        best = keep.sum()  # of the spared ones, the best stay
        assert keep[spare[name]].tolist() == [False] * int(spare[name].sum() - best) + [True] * int(best)
    level = {name: torch.ones(group.units) for name, group in groups.items()}
    kept = chooser.choose(level, 0.5, spare=spare).kept
    assert all(torch.equal(kept[name], spare[name]) for name in groups)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"sparsity": 80}, r"not 80\. 80 % is 0.8"),
        ({"sparsity": 1.0}, "sparsity is the share"),
        ({"sparsity": 0.95, "min_units": 2}, r"0.95 is out of reach: with at least 2 units.*0.8 of the 20"),
        ({"sparsity": 0.99, "target": "parameters"}, r"0.99 less parameters is out of reach.*0\.\d+ less"),
        ({"target": "flop"}, "did you mean 'flops'"),
        ({"target": "flops"}, r"pass example="),
        ({"spread": "layer"}, "Valid: 'uniform', 'global'"),
        ({"normalise": "l2"}, "unknown normalisation 'l2'"),
        ({"normalise": "price"}, 'works with target="parameters"'),
        ({"round_to": 0}, "round_to must be an integer of at least 1, not 0"),
        ({"min_units": 0}, "min_units must be an integer of at least 1"),
        ({"scores": {"0": torch.ones(8)}}, r"group '2' takes 12 scores, one per unit; given: none"),
        ({"scores": {"0": torch.ones(8), "2": torch.ones(11)}}, r"given: \(11,\)"),
        ({"scores": {"0": torch.ones(8), "2": torch.full((12,), math.nan)}}, "12 scores of '2' are NaN"),
    ],
)
def test_errors_say_what_was_passed(options, message):
    model, groups = fcn()
    with pytest.raises(ValueError, match=message):
        choose_units(model, groups, **({"scores": rising(groups)} | options))


def test_no_groups_nothing_to_choose():
    with pytest.raises(ValueError, match="Linear has no groups"):
        choose_units(nn.Linear(2, 2), Groups({}), {}, 0.5)


def test_tied_weights_count_once():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight
    only = Group("0", "hidden", 4, (Slice("0.bias", 0, one_each(4), "makes"),))
    assert parameters_left(model, Groups({"0": only}), {}) == 24
