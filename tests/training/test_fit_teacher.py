"""Training with a teacher: half of the loss is the divergence from another network's outputs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from shaver.likelihoods import TEMPERATURE, Classification, Likelihood, Regression
from shaver.training import Options, fit
from tests.training.problems import batches, identical, network, weights


def probabilities(logits):
    exponentials = (logits / TEMPERATURE).exp()
    return exponentials / exponentials.sum(-1, keepdim=True)


def test_training_with_a_teacher_equals_a_handwritten_loop():
    data = [(x.double(), y) for x, y in batches()]
    ours, teacher = network().double(), network(seed=5, dropout=0.5).double().train()
    reference, guide = copy.deepcopy(ours), copy.deepcopy(teacher).eval()
    options = Options(schedule="constant", weight_decay=1e-2, teacher=teacher)
    fit(ours, data, method="map", epochs=3, lr=0.1, options=options)
    optimizer = torch.optim.SGD(reference.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-2)
    for _ in range(3):
        for x, y in data:
            outputs, aim = reference(x), probabilities(guide(x).detach())
            divergence = (aim * (aim / probabilities(outputs)).log()).sum(1).mean()
            optimizer.zero_grad()
            (0.5 * F.cross_entropy(outputs, y) + 0.5 * TEMPERATURE**2 * divergence).backward()
            optimizer.step()
    for a, b in zip(ours.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


def test_the_teacher_is_left_as_it_was():
    teacher = network(seed=5, dropout=0.5).train()
    teacher[1].eval()
    before = weights(teacher)
    fit(network(), batches(), method="map", epochs=1, teacher=teacher)
    assert identical(before, weights(teacher))
    assert [module.training for module in teacher] == [True, False, True, True, True]
    assert all(parameter.grad is None for parameter in teacher.parameters())


def test_a_student_comes_nearer_to_its_teacher_than_labels_alone_bring_it():
    teacher, x = network(seed=5), batches(samples=512, seed=3)
    fit(teacher, x, method="map", epochs=3)
    teacher.eval()
    shuffled = [(inputs, y.roll(1)) for inputs, y in x]  # labels that say nothing of the inputs
    distance = {}
    for guide in (None, teacher):
        student = network()
        fit(student, shuffled, method="map", epochs=5, teacher=guide)
        inputs = torch.cat([inputs for inputs, _ in x])
        with torch.no_grad():
            distance[guide is None] = float((student.eval()(inputs).softmax(1) - teacher(inputs).softmax(1)).norm())
    assert distance[False] < 0.7 * distance[True]


@pytest.mark.parametrize("shape", [(5, 3), (5, 4, 3)])
def test_divergences_are_those_of_the_definition(shape):
    generator = torch.Generator().manual_seed(0)
    f, g = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    targets = torch.randint(0, 3, shape[:-1], generator=generator)
    p, q = probabilities(f), probabilities(g)
    each = TEMPERATURE**2 * (q * (q / p).log()).sum(-1)
    torch.testing.assert_close(Classification().divergence(f, g, targets), each.reshape(5, -1).sum(1))
    first = Classification(class_dim=1)
    torch.testing.assert_close(
        first.divergence(f.movedim(-1, 1), g.movedim(-1, 1), targets), each.reshape(5, -1).sum(1)
    )
    targets.view(-1)[:2] = -100
    each.view(-1)[:2] = 0
    torch.testing.assert_close(Classification().divergence(f, g, targets), each.reshape(5, -1).sum(1))
    noise = Regression(0.3)
    normal = [torch.distributions.Normal(values, 0.3**0.5) for values in (g, f)]
    expected = torch.distributions.kl_divergence(*normal).flatten(1).sum(1)
    torch.testing.assert_close(noise.divergence(f, g, f), expected)


def test_what_does_not_go_with_a_teacher_is_refused(tmp_path):
    with pytest.raises(ValueError, match='method="map"'):
        fit(network(), batches(), method="spam", epochs=1, teacher=network())
    with pytest.raises(TypeError, match="teacher is a network"):
        fit(network(), batches(), method="map", epochs=1, teacher="dense")
    with pytest.raises(ValueError, match=r"\(16, 5\).*\(16, 3\)"):
        fit(network(), batches(), method="map", epochs=1, teacher=nn.Linear(6, 5))

    class Own(Likelihood):
        def nll(self, outputs, targets):
            return F.cross_entropy(outputs, targets, reduction="none")

        def root(self, outputs):
            raise NotImplementedError

    with pytest.raises(TypeError, match="Own has no divergence"):
        fit(network(), batches(), method="map", epochs=1, teacher=network(), likelihood=Own())
    fit(network(), batches(), method="map", epochs=1, teacher=network(1), folder=tmp_path)
    with pytest.raises(ValueError, match="teacher"):
        fit(network(), batches(), method="map", epochs=1, teacher=network(2), folder=tmp_path)
