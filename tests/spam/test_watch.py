"""When δ may be learned, and what is noticed when learning it does harm."""

import math
import random

from shaver.settings import Settings
from shaver.timetable import Timetable
from shaver.watch import FALLS, PAUSE, WINDOW, Watch
from tests.seeds import OFFSET


def told(watch: Watch, losses: list[float]) -> Watch:
    for loss in losses:
        watch.record(loss)
    return watch


def noise(count: int, size: float = 0.05) -> list[float]:
    draw = random.Random(0 + OFFSET)
    return [draw.uniform(-size, size) for _ in range(count)]


def test_a_loss_has_settled_when_its_last_quarter_brought_little_of_the_fall():
    straight = [2.3 - 0.01 * i + e for i, e in enumerate(noise(200, 0.01))]
    assert not told(Watch(100), straight).has_settled, "each quarter brings a quarter"
    bent = [0.3 + 2 * math.exp(-i / 10) + e for i, e in enumerate(noise(100, 0.01))]
    watch = Watch(100)
    settled_at = next(i for i, loss in enumerate(bent) if told(watch, [loss]).has_settled)
    assert 20 < settled_at < 60, "most of the fall is over after twenty losses"


def test_the_training_may_be_measured_at_any_spacing():
    """What counts is the share of the training so far, not a number of losses."""
    curve = [0.3 + 2 * math.exp(-i / 100) for i in range(1000)]
    starts = []
    for spacing in (1, 5):
        watch = Watch(100)
        starts.append(next(i for i in range(0, 1000, spacing) if told(watch, [curve[i]]).has_settled))
    assert abs(starts[0] - starts[1]) <= 20


def test_a_loss_that_has_not_fallen_yet_has_not_settled():
    """A transformer's loss may stay at its start for a hundred steps."""
    level = [0.69 + e for e in noise(8 * WINDOW, 0.01)]
    assert not told(Watch(100), level).has_settled
    assert not told(Watch(100), [*level, *(value - 0.03 for value in 2 * level)]).has_settled, "less than a tenth"
    assert not told(Watch(100), [*level, *(value - 0.2 for value in level[:WINDOW])]).has_settled, "it still falls"
    assert told(Watch(100), [*level, *(value - 0.2 for value in 2 * level)]).has_settled
    negative = [-0.69 + e for e in noise(8 * WINDOW, 0.01)]  # of a density
    assert not told(Watch(100), negative).has_settled
    assert told(Watch(100), [*negative, *(value - 0.2 for value in 2 * negative)]).has_settled


def test_losses_that_are_not_finite_are_left_out():
    watch = told(Watch(100), [math.nan, math.inf])
    assert not watch.recorded


def test_a_loss_that_rises_beyond_its_noise_is_harm_and_each_sign_doubles_the_pause():
    watch = Watch(100)
    for sign in range(3):
        told(watch, [0.3 + e for e in noise(WINDOW)])
        assert watch.harm(math.nan) is None
        told(watch, [0.6 + e for e in noise(WINDOW)])
        found = watch.harm(math.nan)
        assert found is not None
        assert found.startswith("the training loss rose from 0.")
        assert watch.skipped == PAUSE * 2**sign
    assert watch.signs == 3


def test_a_rise_is_a_share_of_the_loss_also_below_zero():
    """The negative log likelihood of a regression with little noise is negative."""
    watch = told(Watch(100), [-5 + e for e in noise(WINDOW, 0.01)])
    told(watch, [-4.8 + e for e in noise(WINDOW, 0.01)])
    assert watch.harm(math.nan) is None
    told(watch, [-4 + e for e in noise(WINDOW, 0.01)])
    assert watch.harm(math.nan) is not None


def test_after_harm_the_timetable_skips_as_many_updates():
    watch = Watch(100)
    timetable = Timetable(Settings(), None, watch, per_weight=True)
    watch.skipped = 2
    assert [timetable.skips() for _ in range(4)] == [True, True, False, False]


def test_noise_alone_is_no_harm():
    draw = random.Random(1 + OFFSET)
    signs = 0
    for _ in range(200):
        watch = told(Watch(100), [max(0.0, draw.gauss(0.3, 0.1)) for _ in range(2 * WINDOW)])
        signs += watch.harm(math.nan) is not None
    assert signs <= 4


def test_evidence_that_falls_again_and_again_is_harm():
    watch = Watch(100)
    found = [watch.harm(-1000.0 - 10 * i) for i in range(FALLS + 1)]
    assert found[:-1] == [None] * FALLS
    assert found[-1] == f"the log evidence fell from -1,000 to -{1000 + 10 * FALLS:,} over {FALLS} updates"
    large = Watch(100_000)
    assert all(large.harm(-1000.0 - 10 * i) is None for i in range(9)), "a small fall per sample"


def test_the_state_is_all_there_is():
    watch = told(Watch(100), [0.3 + e for e in noise(2 * WINDOW)])
    watch.harm(-5.0)
    other = Watch(100)
    other.load_state(watch.state())
    assert vars(other) == vars(watch)
