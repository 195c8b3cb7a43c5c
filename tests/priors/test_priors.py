"""What stands behind δ: how many numbers, shared by whom, within which bounds."""

import math

import pytest
import torch
from torch import nn

from shaver.priors import make_prior

PARAMETERS = {
    "conv.weight": torch.zeros(4, 3, 5, 5),
    "conv.bias": torch.zeros(4),
    "embedding": torch.zeros(7, 2),
    "positions": torch.zeros(1, 6, 2),
    "scale": torch.zeros(()),
}
TOTAL = sum(p.numel() for p in PARAMETERS.values())
NUMBERS = {"scalar": 1, "layer": 5, "unit": (4 + 3) + 4 + (7 + 2) + (6 + 2) + 1, "parameter": TOTAL}


def numbers(prior):
    return sum(factor.values.numel() for factor in prior.factors)


@pytest.mark.parametrize("kind", NUMBERS)
def test_every_kind_covers_every_parameter_with_its_few_numbers(kind):
    prior = make_prior(kind, PARAMETERS, init=2.5)
    assert prior.kind == kind
    assert numbers(prior) == NUMBERS[kind]
    assert list(prior.delta()) == list(PARAMETERS)
    for name, delta in prior.delta().items():
        torch.testing.assert_close(delta.expand(PARAMETERS[name].shape), torch.full_like(PARAMETERS[name], 2.5))


def test_scalar_and_layer_give_one_number_and_parameter_its_own_tensor_without_a_copy():
    for kind in ("scalar", "layer"):
        assert all(delta.ndim == 0 for delta in make_prior(kind, PARAMETERS).delta().values())
    prior = make_prior("parameter", PARAMETERS)
    assert prior.delta_of("conv.weight").data_ptr() == prior.factors[0].values.data_ptr()


def test_a_unit_prior_multiplies_output_and_input_and_shares_over_the_kernel():
    prior = make_prior("unit", PARAMETERS)
    outputs, inputs = prior.factors[:2]
    outputs.values, inputs.values = torch.arange(1.0, 5.0), torch.tensor([1.0, 10.0, 100.0])
    delta = prior.delta()["conv.weight"].expand(4, 3, 5, 5)
    assert float(delta[2, 1, 4, 0]) == 30.0
    assert float(delta[3, 2, 0, 3]) == 400.0


def test_the_gauge_changes_no_precision():
    prior = make_prior("unit", PARAMETERS)
    prior.factors[1].values = torch.tensor([1.0, 10.0, 100.0])
    before = prior.delta()["conv.weight"]
    prior.fix_gauge()
    torch.testing.assert_close(prior.delta()["conv.weight"], before)
    assert float(prior.factors[1].values.log().mean()) == pytest.approx(0, abs=1e-6)


def test_half_precision_parameters_have_float32_precisions():
    prior = make_prior("parameter", {"w": torch.zeros(3, dtype=torch.bfloat16), "v": torch.zeros(3).double()})
    assert [f.values.dtype for f in prior.factors] == [torch.float32, torch.float64]


def test_a_users_grouping_shares_within_ids_and_across_equal_keys():
    def halves(name, parameter):
        if name == "conv.weight":
            return torch.tensor([5, 5, 9, 9]).reshape(4, 1, 1, 1)  # ids may have gaps
        return ("small", parameter.ndim > 1)

    prior = make_prior(halves, PARAMETERS)
    assert prior.kind == "halves"
    assert numbers(prior) == 2 + 2
    assert [sorted(f.layouts) for f in prior.factors[1:]] == [["conv.bias", "scale"], ["embedding", "positions"]]
    prior.factors[0].values = torch.tensor([3.0, 7.0])
    delta = prior.delta()["conv.weight"].expand(4, 3, 5, 5)
    assert delta[:2].unique().tolist() == [3.0]
    assert delta[2:].unique().tolist() == [7.0]
    sums = prior.factors[0].layouts["conv.weight"].reduce(torch.ones(()))
    assert sums.tolist() == [150.0, 150.0]


def test_a_state_dict_brings_the_numbers_and_bounds_back():
    prior = make_prior("unit", PARAMETERS, bounds=(-3.0, 3.0))
    for factor in prior.factors:
        factor.values = torch.rand_like(factor.values) + 0.5
    other = make_prior("unit", PARAMETERS)
    other.load_state_dict(prior.state_dict())
    assert other.bounds == (-3.0, 3.0)
    for name, delta in prior.delta().items():
        assert torch.equal(other.delta()[name], delta)
    prior.factors[0].values.mul_(2)
    assert not torch.equal(other.delta()["conv.weight"], prior.delta()["conv.weight"])  # its own copy


def test_a_state_of_another_prior_is_refused():
    state = make_prior("layer", PARAMETERS).state_dict()
    with pytest.raises(ValueError, match="saved prior is 'layer', this one is 'unit'"):
        make_prior("unit", PARAMETERS).load_state_dict(state)
    bigger = PARAMETERS | {"conv.bias": torch.zeros(9)}
    with pytest.raises(ValueError, match=r"'conv.bias' .*\(4,\) there and \(9,\) here \(tensors that differ: 1\)"):
        make_prior("parameter", bigger).load_state_dict(make_prior("parameter", PARAMETERS).state_dict())


def test_mistakes_are_answered():
    with pytest.raises(ValueError, match="unknown prior 'units'; did you mean 'unit'"):
        make_prior("units", PARAMETERS)
    with pytest.raises(ValueError, match="initial precision 0"):
        make_prior("scalar", PARAMETERS, init=0.0)
    with pytest.raises(ValueError, match=r"initial precision 5.0 is outside the bounds 1 to 2.7"):
        make_prior("scalar", PARAMETERS, init=5.0, bounds=(0.0, 1.0))
    with pytest.raises(ValueError, match=r"bounds .* not \(1.0, -1.0\)"):
        make_prior("scalar", PARAMETERS, bounds=(1.0, -1.0))
    with pytest.raises(ValueError, match=r"bounds .* not \(0.0, nan\)"):
        make_prior("scalar", PARAMETERS, bounds=(0.0, math.nan))
    with pytest.raises(ValueError, match="no parameters"):
        make_prior("scalar", {})
    with pytest.raises(ValueError, match=r"group ids of 'conv.weight' have shape \(4,\)"):
        make_prior(lambda name, p: torch.arange(len(p)) if p.ndim else "s", PARAMETERS)
    with pytest.raises(ValueError, match=r"group ids of 'conv.bias' must be integers of at least 0"):
        make_prior(lambda name, p: p if name == "conv.bias" else name, PARAMETERS)


@pytest.mark.parametrize("given", [None, [1, 2]])
def test_a_grouping_that_returns_nothing_usable_is_named(given):
    with pytest.raises(TypeError, match=r"the grouping returned .* for 'weight'"):
        make_prior(lambda name, p: given, dict(nn.Linear(3, 2).named_parameters()))
