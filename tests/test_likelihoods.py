"""Every likelihood's root is a square root of its Hessian, and its random gradients have that covariance."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from shaver.likelihoods import Classification, Likelihood, Regression, get_likelihood


class Poisson(Likelihood):
    """The example of the protocol's documentation."""

    def nll(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (outputs.exp() - targets * outputs + torch.lgamma(targets + 1)).flatten(1).sum(1)

    def root(self, outputs: Tensor) -> Tensor:
        return torch.diag_embed((outputs / 2).exp()).movedim(-1, 0)


def outputs_of(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2


def labels_of(classes: int, *shape: int) -> Tensor:
    return torch.randint(0, classes, shape, generator=torch.Generator().manual_seed(1))


CASES = {
    "classification": (Classification(), outputs_of(4, 5), labels_of(5, 4)),
    "two classes": (Classification(), outputs_of(4, 2), labels_of(2, 4)),
    "tokens": (Classification(), outputs_of(3, 2, 4), labels_of(4, 3, 2)),
    "classes first": (Classification(class_dim=1), outputs_of(3, 4, 2), labels_of(4, 3, 2)),
    "regression": (Regression(), outputs_of(4, 3), outputs_of(4, 3, seed=2)),
    "noisy regression": (Regression(noise=0.3), outputs_of(4, 3), outputs_of(4, 3, seed=2)),
    "image regression": (Regression(noise=2.0), outputs_of(3, 2, 2), outputs_of(3, 2, 2, seed=2)),
    "poisson": (Poisson(), outputs_of(4, 3), labels_of(6, 4, 3).double()),
}


@pytest.fixture(params=CASES, ids=str)
def case(request):
    return CASES[request.param]


def hessian(likelihood: Likelihood, outputs: Tensor, targets: Tensor, sample: int) -> Tensor:
    """∂²(−log p)/∂f² of one sample by automatic differentiation, as a matrix."""
    one = slice(sample, sample + 1)
    size = outputs[0].numel()
    full = torch.func.hessian(lambda f: likelihood.nll(f, targets[one]).sum())(outputs[one])
    return full.reshape(size, size)


def test_the_roots_columns_give_the_hessian_of_each_sample(case):
    likelihood, outputs, targets = case
    columns = likelihood.root(outputs)
    assert columns.shape[1:] == outputs.shape
    for sample in range(len(outputs)):
        flat = columns[:, sample].flatten(1)
        expected = hessian(likelihood, outputs, targets, sample)
        assert torch.allclose(flat.T @ flat, expected, atol=1e-10)


def test_random_gradients_have_mean_zero_and_the_hessian_as_covariance(case):
    likelihood, outputs, targets = case
    draws, first = 20_000, outputs[:1]
    many = first.expand(draws, *first.shape[1:])
    gradients = likelihood.mc_gradient(many, torch.Generator().manual_seed(0)).flatten(1)
    expected = hessian(likelihood, outputs, targets, 0)
    scale = float(expected.abs().max()) + 1e-3
    assert gradients.mean(0).abs().max() < 6 * math.sqrt(scale / draws)
    covariance = gradients.T.double() @ gradients.double() / draws
    assert (covariance - expected).abs().max() < 6 * 3 * scale / math.sqrt(draws)


def test_random_gradients_are_decided_by_the_generator(case):
    likelihood, outputs, _ = case
    first, again, *others = (
        likelihood.mc_gradient(outputs, torch.Generator().manual_seed(s)) for s in (0, 0, *range(1, 30))
    )
    assert torch.equal(first, again)
    assert any(not torch.equal(first, other) for other in others)  # where one class is almost certain, many are equal


def test_random_gradients_can_do_without_a_generator(case):
    likelihood, outputs, _ = case
    torch.manual_seed(0)
    gradient = likelihood.mc_gradient(outputs)
    assert gradient.shape == outputs.shape
    assert torch.isfinite(gradient).all()


def test_the_nll_has_one_number_a_sample_and_matches_torch():
    outputs, labels = outputs_of(6, 5), labels_of(5, 6)
    assert torch.allclose(Classification().nll(outputs, labels), F.cross_entropy(outputs, labels, reduction="none"))
    images, pixels = outputs_of(3, 4, 2, 2), labels_of(4, 3, 2, 2)
    summed = F.cross_entropy(images, pixels, reduction="none").flatten(1).sum(1)
    assert torch.allclose(Classification(class_dim=1).nll(images, pixels), summed)
    y = outputs_of(6, 5, seed=3)
    normal = -torch.distributions.Normal(outputs, math.sqrt(0.3)).log_prob(y).sum(1)
    assert torch.allclose(Regression(noise=0.3).nll(outputs, y), normal)


def test_ignored_labels_count_for_nothing():
    outputs, labels = outputs_of(2, 3, 4), labels_of(4, 2, 3)
    labels[0, 1] = -100
    Classification().check(outputs, labels)
    kept = F.cross_entropy(outputs[0, [0, 2]], labels[0, [0, 2]], reduction="sum")
    assert torch.allclose(Classification().nll(outputs, labels)[0], kept)


def test_half_precision_outputs_are_summed_in_float32():
    outputs, labels = outputs_of(4, 5), labels_of(5, 4)
    assert Classification().nll(outputs.half(), labels).dtype == torch.float32


@pytest.mark.parametrize("logits", [[1000.0, 0.0, -1000.0], [0.0, -1e30, 0.0], [80.0, 80.0, -80.0]])
def test_the_root_stays_finite_for_certain_predictions(logits):
    outputs = torch.tensor([logits])
    columns = Classification().root(outputs)
    assert torch.isfinite(columns).all()
    p = outputs.softmax(-1)
    expected = torch.diag(p[0]) - p.T @ p
    assert torch.allclose(columns[:, 0].T @ columns[:, 0], expected, atol=1e-6)


@pytest.mark.parametrize(
    ("outputs", "targets", "message"),
    [
        (torch.zeros(4, 3), torch.tensor([0, 1, 2, 3]), "label 3 is out of range: the network has 3 outputs"),
        (torch.zeros(4, 3), torch.tensor([0, 1, 2, -1]), "label -1 is out of range"),
        (torch.zeros(4, 3), torch.zeros(4), "class indices"),
        (torch.zeros(4, 3), torch.zeros(5, dtype=torch.long), r"targets have shape \(5,\)"),
        (torch.zeros(4, 3), torch.zeros(4, 3), "Class probabilities as targets are not supported"),
        (torch.zeros(4), torch.zeros(4, dtype=torch.long), "at least two classes"),
        (torch.zeros(4, 1), torch.zeros(4, dtype=torch.long), "yes/no network with one logit"),
    ],
)
def test_labels_that_do_not_fit_are_named(outputs, targets, message):
    with pytest.raises(ValueError, match=message):
        Classification().check(outputs, targets)


def test_regression_targets_that_would_broadcast_are_refused():
    with pytest.raises(ValueError, match="unsqueeze"):
        Regression().check(torch.zeros(4, 1), torch.zeros(4))


def test_the_noise_is_positive_and_saved():
    for wrong in (0.0, -1.0, math.inf, math.nan):
        with pytest.raises(ValueError, match="noise variance must be positive"):
            Regression(noise=wrong)
    one, other = Regression(noise=0.3), Regression()
    other.load_state(one.state())
    assert other.noise == 0.3
    assert Classification().state() == {}


def test_a_root_too_large_for_memory_is_refused_with_the_way_out():
    with pytest.raises(ValueError, match='source="mc"'):
        Classification().root(torch.zeros(2, 64, 50_000))
    with pytest.raises(ValueError, match='source="mc"'):
        Regression().root(torch.zeros(1, 200_000))


def test_likelihoods_go_by_name_or_object():
    assert isinstance(get_likelihood("classification"), Classification)
    assert isinstance(get_likelihood("regression"), Regression)
    own = Poisson()
    assert get_likelihood(own) is own
    with pytest.raises(ValueError, match="did you mean 'regression'"):
        get_likelihood("regresion")
    with pytest.raises(TypeError, match=r"subclass of shaver\.likelihoods\.Likelihood"):
        get_likelihood(F.mse_loss)
