"""The check for a user's own grouping passes what is right and names what is wrong."""

import pytest
import torch
from torch import nn

from shaver.testing import check_prior


@pytest.mark.parametrize("kind", ["scalar", "layer", "unit", "parameter"])
def test_the_four_priors_pass(kind):
    check_prior(kind)


def test_a_sound_grouping_passes_on_ours_and_on_the_users_network():
    def rows(name, parameter):
        return (
            torch.arange(len(parameter)).reshape(-1, *[1] * (parameter.ndim - 1)) if parameter.ndim > 1 else "vectors"
        )

    check_prior(rows)
    check_prior(rows, nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4)))


def test_a_grouping_by_value_is_found_out():
    def by_sign(name, parameter):
        return (parameter > 0).long()

    with pytest.raises(AssertionError, match=r"by_sign.*depend on the weights' values"):
        check_prior(by_sign)


def test_a_grouping_that_touches_the_weights_is_found_out():
    def careless(name, parameter):
        parameter.data.mul_(2)
        return name

    with pytest.raises(AssertionError, match=r"careless.*changed the model's weights"):
        check_prior(careless)


def test_a_wrong_shape_is_answered_by_the_prior_itself():
    with pytest.raises(ValueError, match="does not broadcast"):
        check_prior(lambda name, parameter: torch.zeros(17, dtype=torch.long))
