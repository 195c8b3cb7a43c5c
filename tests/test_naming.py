"""Unknown names are answered with the valid ones."""

import pytest

from shaver.naming import check_name


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
