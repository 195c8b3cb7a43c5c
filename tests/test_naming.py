"""Unknown names are answered with the valid ones."""

import numpy as np
import pytest

from shaver.naming import check_count, check_name, check_number


def test_a_valid_name_comes_back():
    assert check_name("colour", "red", ["red", "blue"]) == "red"
    assert check_name("colour", "red", {"red": 1}) == "red"


def test_a_near_miss_is_answered_with_what_was_meant():
    with pytest.raises(ValueError, match=r"^unknown colour 'rde'; did you mean 'red'\? Valid: 'red', 'blue'\.$"):
        check_name("colour", "rde", ["red", "blue"])


def test_a_far_miss_lists_the_valid_names():
    with pytest.raises(ValueError, match=r"^unknown colour 'x'\. Valid: 'red', 'blue'\.$"):
        check_name("colour", "x", ["red", "blue"])


@pytest.mark.parametrize("wrong", [None, 3, ["red"], b"red"])
def test_what_is_not_a_name_is_refused_too(wrong):
    with pytest.raises(ValueError, match="unknown colour"):
        check_name("colour", wrong, ["red", "blue"])


@pytest.mark.parametrize("wrong", [1.5, "3", None, 0, -1, True, float("nan"), float("inf"), [1]])
def test_a_count_is_a_whole_number(wrong):
    with pytest.raises(ValueError, match="epochs must be an integer of at least 1, not"):
        check_count("epochs", wrong)


@pytest.mark.parametrize("right", [3, 3.0, np.int64(3), np.float64(3.0)])
def test_a_count_may_come_in_any_type(right):
    found = check_count("epochs", right)
    assert type(found) is int
    assert found == 3


@pytest.mark.parametrize("wrong", ["0.1", None, 0, -1, True, float("nan"), float("inf")])
def test_a_number_is_finite_and_in_its_range(wrong):
    with pytest.raises(ValueError, match="lr must be a finite number above 0, not"):
        check_number("lr", wrong, least=0, above=True)
    assert check_number("lr", np.float32(0.5), least=0.5) == 0.5
