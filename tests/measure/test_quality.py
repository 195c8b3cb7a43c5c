"""Quality agrees with torchmetrics and scikit-learn, whatever the batches, and names bad data."""

import math
from types import SimpleNamespace

import pytest
import torch
from sklearn.metrics import brier_score_loss, log_loss, mean_squared_error
from torch import nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassCalibrationError

from shaver.likelihoods import Classification, Likelihood, Regression
from shaver.measure import quality

CLASSES = 5


class Given(nn.Module):
    """Returns its input: the test chooses the outputs."""

    def forward(self, x):
        return x


@pytest.fixture
def data():
    generator = torch.Generator().manual_seed(0)
    outputs = 2 * torch.randn(203, CLASSES, generator=generator)
    # Half the labels are the network's own guess, so that no bin is empty and accuracy is far from chance.
    labels = torch.where(
        torch.rand(203, generator=generator) < 0.5,
        outputs.argmax(1),
        torch.randint(CLASSES, (203,), generator=generator),
    )
    return outputs, labels


def batched(outputs, labels, size):
    return list(zip(outputs.split(size), labels.split(size), strict=True))


@pytest.mark.parametrize("size", [203, 50, 1])
def test_classification_agrees_with_the_peers_for_any_batch_size(data, size):
    outputs, labels = data
    found = quality(Given(), batched(*data, size))
    p = outputs.double().softmax(1)
    one_hot = nn.functional.one_hot(labels, CLASSES)
    assert found.count == 203
    assert found.accuracy == pytest.approx(MulticlassAccuracy(CLASSES, average="micro")(p, labels).item())
    assert found.ece == pytest.approx(MulticlassCalibrationError(CLASSES, n_bins=15)(p, labels).item(), abs=5e-7)
    assert found.nll == pytest.approx(log_loss(labels, p, labels=range(CLASSES)), rel=1e-9)
    # Brier is the squared error summed over classes; scikit-learn's mean squared error is a mean over them too.
    assert found.brier == pytest.approx(CLASSES * mean_squared_error(one_hot, p), rel=1e-9)
    assert found.rmse is None
    assert sorted(found.as_dict()) == ["accuracy", "brier", "count", "ece", "nll"]


def test_brier_of_two_classes_is_twice_the_one_of_scikit_learn():
    outputs = torch.randn(40, 2, generator=torch.Generator().manual_seed(0))
    labels = torch.randint(2, (40,), generator=torch.Generator().manual_seed(1))
    expected = 2 * brier_score_loss(labels, outputs.double().softmax(1)[:, 1])
    assert quality(Given(), [(outputs, labels)]).brier == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("bins", [1, 7, 30])
def test_the_number_of_bins_is_an_option(data, bins):
    outputs, labels = data
    expected = MulticlassCalibrationError(CLASSES, n_bins=bins)(outputs.double().softmax(1), labels).item()
    # torchmetrics subtracts accuracy and confidence, both near 1, in float32.
    assert quality(Given(), batched(*data, 64), bins=bins).ece == pytest.approx(expected, abs=5e-7)


def test_a_certain_prediction_belongs_to_the_last_bin():
    outputs = torch.tensor([[1000.0, 0], [math.log(0.95 / 0.05), 0]])  # probabilities 1 and 0.95, one bin of ten
    found = quality(Given(), [(outputs, torch.tensor([0, 1]))], bins=10)
    assert found.ece == pytest.approx(abs((1 - 1) + (0 - 0.95)) / 2)
    assert found.accuracy == 0.5


def test_sums_of_many_equal_batches_do_not_drift():
    outputs, labels = torch.tensor([[0.1, 0.0]] * 1000), torch.zeros(1000, dtype=torch.long)
    found = quality(Given(), ((outputs, labels) for _ in range(200)))
    assert found.nll == pytest.approx(math.log1p(math.exp(-float(torch.tensor(0.1)))), rel=1e-12)


@pytest.mark.parametrize("class_dim", [-1, 1])
def test_tokens_are_labels_of_their_own_and_ignored_ones_count_for_nothing(data, class_dim):
    outputs, labels = (t[:200] for t in data)
    labels = labels.clone()
    labels[::3] = -100
    kept = labels != -100
    tokens = outputs.reshape(20, 10, CLASSES).movedim(-1, class_dim)
    found = quality(Given(), batched(tokens, labels.reshape(20, 10), 7), likelihood=Classification(class_dim=class_dim))
    flat = quality(Given(), [(outputs[kept], labels[kept])])
    assert found.count == int(kept.sum())
    assert found.as_dict() == pytest.approx(flat.as_dict(), rel=1e-12)


def test_regression_counts_samples_and_uses_the_noise():
    outputs = torch.randn(11, 3, generator=torch.Generator().manual_seed(0))
    targets = torch.randn(11, 3, generator=torch.Generator().manual_seed(1))
    found = quality(Given(), batched(outputs, targets, 4), likelihood=Regression(noise=0.3))
    normal = torch.distributions.Normal(outputs.double(), math.sqrt(0.3))
    assert found.nll == pytest.approx(-normal.log_prob(targets.double()).sum(1).mean().item(), rel=1e-9)
    assert found.rmse == pytest.approx(mean_squared_error(targets.double(), outputs.double()) ** 0.5, rel=1e-9)
    assert sorted(found.as_dict()) == ["count", "nll", "rmse"]
    assert found.count == 11


def test_a_likelihood_of_the_users_own_gives_its_nll():
    class Poisson(Likelihood):
        def nll(self, outputs, targets):
            return (outputs.exp() - targets * outputs + torch.lgamma(targets + 1)).flatten(1).sum(1)

        def root(self, outputs):
            raise NotImplementedError

    outputs, targets = torch.randn(9, 1), torch.randint(5, (9, 1)).float()
    found = quality(Given(), batched(outputs, targets, 4), likelihood=Poisson())
    expected = -torch.distributions.Poisson(outputs.double().exp()).log_prob(targets.double()).mean().item()
    assert found.as_dict() == {"count": 9, "nll": pytest.approx(expected, rel=1e-6)}


class TestBatches:
    def test_dicts_and_outputs_with_logits(self, data):
        class Language(nn.Module):
            def forward(self, input_ids, attention_mask):
                return SimpleNamespace(logits=input_ids * attention_mask)

        outputs, labels = data
        batch = {"input_ids": outputs, "attention_mask": torch.ones(1), "labels": labels}
        assert quality(Language(), [batch]) == quality(Given(), [data])

    def test_the_users_own_layout(self, data):
        outputs, labels = data
        found = quality(
            Given(),
            [{"image": outputs, "truth": labels}],
            forward=lambda model, batch: model(batch["image"]),
            targets=lambda batch: batch["truth"],
        )
        assert found == quality(Given(), [data])

    def test_an_unknown_layout_says_what_would_work(self, data):
        with pytest.raises(KeyError, match="needs the key 'labels'; this one has 'x', 'y'"):
            quality(nn.Module(), [{"x": data[0], "y": data[1]}], forward=lambda model, batch: batch["x"])
        with pytest.raises(TypeError, match=r"not a Tensor; pass forward="):
            quality(Given(), data)  # one batch instead of a list of them


class TestLeavesTheModelAsFound:
    def model(self):
        model = nn.Sequential(nn.BatchNorm1d(CLASSES), nn.Dropout(0.5), nn.BatchNorm1d(CLASSES))
        model.train()
        model[2].eval()  # frozen
        return model

    def modes(self, model):
        return [module.training for module in model.modules()]

    def test_modes_statistics_and_gradients(self, data):
        model = self.model()
        modes, state = self.modes(model), {k: v.clone() for k, v in model.state_dict().items()}
        one, two = quality(model, batched(*data, 50)), quality(model, batched(*data, 50))
        assert one == two  # dropout is off
        assert self.modes(model) == modes == [True, True, True, False]
        assert all(torch.equal(state[key], value) for key, value in model.state_dict().items())
        assert all(p.grad is None for p in model.parameters())
        assert torch.is_grad_enabled()

    def test_modes_after_an_error(self):
        model = self.model()
        with pytest.raises(ValueError, match="label 9"):
            quality(model, [(torch.zeros(2, CLASSES), torch.tensor([0, 9]))])
        assert self.modes(model) == [True, True, True, False]


class TestBadData:
    def test_an_empty_loader(self):
        with pytest.raises(ValueError, match="nothing to measure: the loader is empty"):
            quality(Given(), [])

    def test_every_label_ignored(self):
        with pytest.raises(ValueError, match="every label is ignored"):
            quality(Given(), [(torch.zeros(2, 3), torch.full((2,), -100))])

    def test_a_label_out_of_range(self):
        with pytest.raises(ValueError, match="label 3 is out of range: the network has 3 outputs"):
            quality(Given(), [(torch.zeros(2, 3), torch.tensor([0, 3]))])

    def test_nan_in_the_inputs_is_told_from_nan_in_the_weights(self):
        x, y = torch.zeros(2, 3), torch.tensor([0, 1])
        bad = x.clone()
        bad[1, 1] = float("nan")
        with pytest.raises(ValueError, match="the inputs of batch 1 hold NaN"):
            quality(Given(), [(x, y), (bad, y)])
        broken = nn.Linear(3, 3)
        nn.init.constant_(broken.weight, float("nan"))
        with pytest.raises(ValueError, match="outputs for batch 0 hold NaN or infinity although its inputs do not"):
            quality(broken, [(x, y)])

    def test_nan_targets(self):
        with pytest.raises(ValueError, match="targets of batch 0 hold NaN"):
            quality(Given(), [(torch.zeros(2, 1), torch.full((2, 1), float("nan")))], likelihood="regression")

    def test_an_impossible_class_is_no_error(self):
        found = quality(Given(), [(torch.tensor([[0.0, 0.0, -math.inf]]), torch.tensor([0]))])
        assert found.nll == pytest.approx(math.log(2))

    def test_bins_and_likelihood_are_checked(self):
        with pytest.raises(ValueError, match="bins must be an integer of at least 1, not 0"):
            quality(Given(), [], bins=0)
        with pytest.raises(ValueError, match="did you mean 'classification'"):
            quality(Given(), [], likelihood="clasification")
