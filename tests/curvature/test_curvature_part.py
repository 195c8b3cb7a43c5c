"""Part of the data: ``fraction`` and ``max_samples`` estimate the sum over all of it without bias."""

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from shaver import curvature
from tests.curvature.cases import BY_NAME


def flat(result: curvature.Curvature) -> Tensor:
    return torch.cat([values.flatten() for values in result.diagonal().values()])


def loader(name: str, count: int, batch_size: int) -> DataLoader:
    x, y = BY_NAME[name].batches((count,))[0]
    return DataLoader(TensorDataset(x, y), batch_size=batch_size)


PARTS = [{"fraction": 0.5}, {"fraction": 0.3}, {"max_samples": 6}, {"max_samples": 1}]


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("part", PARTS, ids=str)
def test_equal_samples_are_scaled_exactly(part: dict, structure: str):
    case = BY_NAME["lenet"]
    x, y = case.batches((1,))[0]
    data = DataLoader(TensorDataset(x.expand(20, -1, -1, -1), y.expand(20)), batch_size=4)
    model = case.model()
    whole = curvature.estimate(model, data, structure=structure)
    estimate = curvature.estimate(model, data, structure=structure, **part)
    torch.testing.assert_close(flat(estimate), flat(whole), rtol=1e-10, atol=1e-14)
    assert estimate.log_likelihood == pytest.approx(whole.log_likelihood, rel=1e-10)
    assert estimate.data_size == whole.data_size == 20


@pytest.mark.parametrize("part", [{"fraction": 0.5}, {"max_samples": 5}], ids=str)
def test_the_estimate_is_unbiased_over_seeds(part: dict):
    case = BY_NAME["mlp"]
    model, data = case.model(), loader("mlp", 12, 3)
    whole = curvature.estimate(model, data, source="ef")
    runs = [curvature.estimate(model, data, source="ef", seed=seed, **part) for seed in range(150)]
    draws = torch.stack([flat(run) for run in runs])
    error = draws.std(0) / len(draws) ** 0.5
    alive = flat(whole) > 0
    assert (error[alive] > 0).all(), "other seeds take other samples"
    z = (draws.mean(0) - flat(whole)) / error
    assert z[alive].abs().max() < 5
    likelihoods = torch.tensor([run.log_likelihood for run in runs])
    assert abs(likelihoods.mean() - whole.log_likelihood) < 4 * likelihoods.std() / len(runs) ** 0.5


def test_less_data_costs_fewer_forward_passes():
    case = BY_NAME["mlp"]
    model, seen = case.model(), []
    model.register_forward_pre_hook(lambda module, args: seen.append(len(args[0])))
    curvature.estimate(model, loader("mlp", 40, 4), max_samples=8)
    assert sum(seen) <= 12


def test_more_samples_than_there_are_means_all_of_them():
    case = BY_NAME["mlp"]
    model, data = case.model(), loader("mlp", 7, 3)
    whole, capped = curvature.estimate(model, data), curvature.estimate(model, data, max_samples=100)
    assert torch.equal(flat(whole), flat(capped))
    assert torch.equal(flat(whole), flat(curvature.estimate(model, data, fraction=1.0)))


IMPOSSIBLE = [{"fraction": 0.0}, {"fraction": 1.5}, {"fraction": -0.1}, {"max_samples": 0}]


@pytest.mark.parametrize("part", IMPOSSIBLE, ids=str)
def test_impossible_parts_are_refused(part: dict):
    case = BY_NAME["mlp"]
    value = str(next(iter(part.values())))
    with pytest.raises(ValueError, match=value):
        curvature.estimate(case.model(), case.batches(), **part)


def test_fraction_and_max_samples_together_are_refused():
    case = BY_NAME["mlp"]
    with pytest.raises(ValueError, match="max_samples"):
        curvature.estimate(case.model(), case.batches(), fraction=0.5, max_samples=2)
