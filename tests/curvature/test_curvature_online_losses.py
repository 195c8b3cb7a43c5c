"""Losses that are no plain cross entropy, certain predictions, mixed precision and overflow."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.curvature.loss_scale import read_loss
from shaver.likelihoods import Classification
from tests.curvature.online_cases import (
    N,
    assert_step,
    nlls,
    online_for,
    prepare,
)
from tests.curvature.reference import assert_all_same

UNREADABLE: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "label smoothing": lambda f, y: F.cross_entropy(f, y, label_smoothing=0.1),
    "class weights": lambda f, y: F.cross_entropy(f, y, weight=torch.tensor([1.0, 2.0, 4.0]).to(f)),
    "a further term": lambda f, y: F.cross_entropy(f, y) + 0.1 * f.square().mean(),
    "probabilities": lambda f, y: F.nll_loss(f.softmax(1).log().softmax(1), y),
    "the wrong sign": lambda f, y: -F.cross_entropy(f, y),
}


@pytest.mark.parametrize("source", ["ef", "mc"])
@pytest.mark.parametrize("loss", UNREADABLE)
def test_a_loss_that_cannot_be_read_says_what_to_do(loss: str, source: str):
    _, model, ((x, y),) = prepare("lenet", (9,))
    with torch.no_grad():  # where all classes are equally likely, smoothed labels only scale the gradient
        for parameter in list(model.parameters())[-2:]:
            parameter.mul_(20)
    online_for(model, source=source)
    with pytest.raises(ValueError, match=r'(?s)not a multiple of the cross entropy.*loss="mean".*source="mc"'):
        UNREADABLE[loss](model(x), y).backward()


@pytest.mark.parametrize("loss", UNREADABLE)
def test_mc_with_the_reduction_told_needs_no_reading(loss: str):
    case, model, ((x, y),) = prepare("lenet", (9,))
    plain = online_for(model, source="mc")
    with plain.measure():
        nlls(case, model, (x, y)).mean().backward()
    plain.close()
    online = online_for(model, source="mc", loss="mean")
    with online.measure():
        UNREADABLE[loss](model(x), y).backward()
    assert_all_same(online.curvature().diagonal(), plain.curvature().diagonal(), 0.0)
    assert online.weight == 1
    assert online.curvature().log_likelihood != online.curvature().log_likelihood, "nobody has told it: NaN"


@pytest.mark.parametrize(("loss", "weight"), [("mean", 1.0), ("sum", 7.0)])
@pytest.mark.parametrize("scale", [1.0, 1024.0])
def test_a_told_reduction_is_over_the_samples_of_a_step(loss: str, weight: float, scale: float):
    case, model, batches = prepare("regression", (4, 3))
    online = online_for(model, likelihood=case.likelihood, loss=loss)
    for batch in batches:
        nll = nlls(case, model, batch)
        online.note(float(nll.detach().sum()))
        (scale * nll.sum() / (7 if loss == "mean" else 1)).backward()
    online.step(scale=scale)
    assert_step(online, case, batches)
    assert online.weight == pytest.approx(weight)


class Shift(nn.Module):
    """Logits that are given, with a parameter to measure."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(10))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


def read_back(logits: Tensor, y: Tensor, precise: bool = False) -> tuple[float, float]:
    """Weight and log likelihood of a mean cross entropy, computed in float32 or in float64."""
    model = Shift()
    online = online_for(model)
    with online.measure():
        outputs = model(logits)
        F.cross_entropy(outputs.double() if precise else outputs, y).backward()
    return online.weight, online.curvature().log_likelihood


@pytest.mark.parametrize("precise", [False, True])
@pytest.mark.parametrize("gap", [5.0, 12.0, 15.0, 16.0, 18.0, 40.0, 80.0, 99.0, 120.0])
def test_confident_predictions_are_still_a_cross_entropy(gap: float, precise: bool):
    """In float32, 1 − p of the label is rounded to a few digits or to nothing; the other classes keep theirs."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(10, (64,), generator=generator)
    logits = torch.randn(64, 10, generator=generator) + gap * F.one_hot(y, 10)
    weight, log_likelihood = read_back(logits, y, precise)
    assert weight == pytest.approx(1, rel=1e-3)
    wanted = -float(F.cross_entropy(logits.double(), y)) * N
    assert log_likelihood == pytest.approx(wanted, rel=1e-2, abs=1e-4)


def test_a_class_that_is_ruled_out_is_not_taken_for_the_label():
    """Gradient 0 at the label, because p = 1, and at a class whose p has underflown."""
    generator = torch.Generator().manual_seed(0)
    y = torch.randint(1, 10, (64,), generator=generator)
    logits = torch.full((64, 10), -40.0).scatter(1, y.unsqueeze(1), 0.0)
    logits[:, 0] = -200.0
    weight, log_likelihood = read_back(logits, y)
    assert weight == pytest.approx(1, rel=1e-3)
    assert log_likelihood == pytest.approx(0, abs=1e-6)


def test_one_output_is_no_classification():
    model = nn.Linear(3, 1)
    online_for(model)
    with pytest.raises(ValueError, match="at least two classes"):
        F.binary_cross_entropy_with_logits(model(torch.randn(6, 3)), torch.ones(6, 1)).backward()


# Mixed precision -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["conv2d", "transformer-block", "vision-transformer", "attention-batch-first"])
@pytest.mark.parametrize("source", ["ef", "mc"])
def test_autocast_gives_nearly_the_same_numbers_by_the_same_rules(name: str, source: str):
    """Without max pooling, in which a rounded tie sends a gradient to another pixel."""
    _case, model, (batch,) = prepare(name, (8,))
    model.float()
    x, y = batch[0].float(), batch[1]
    found = []
    for enabled in (False, True):
        online = online_for(model, source=source, seed=2)
        model.zero_grad()
        # without oneDNN: its bfloat16 kernels do not run on every CPU that claims them
        with torch.backends.mkldnn.flags(enabled=False):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                loss = F.cross_entropy(model(x), y)
            with online.measure():
                (1024 * loss).backward()
        found.append(online.curvature())
        online.close()
    exact, mixed = found
    assert exact.rules == mixed.rules
    for parameter, h in exact.diagonal().items():
        other = mixed.diagonal()[parameter]
        assert other.dtype == torch.float32
        # rounding may change one of the eight labels that MC samples
        assert float((other - h).norm() / h.norm()) < (0.15 if source == "ef" else 0.5), parameter
    assert mixed.log_likelihood == pytest.approx(exact.log_likelihood, rel=0.05)


def test_infinite_gradients_are_an_error_that_names_the_parameter():
    case, model, (batch,) = prepare("mlp")
    online = online_for(model, loss="mean")
    with torch.no_grad():
        model[0].weight[0, 0] = float("nan")
    with pytest.raises(FloatingPointError, match=r"'0.weight'.*not finite at step 1"), online.measure():
        nlls(case, model, batch).mean().backward()


def test_a_step_that_the_scaler_will_skip_is_not_measured():
    case, model, batches = prepare("mlp", (4, 4))
    online = online_for(model, decay=0.5)
    with online.measure():
        nlls(case, model, batches[0]).mean().backward()
    before = {"average": {n: h.clone() for n, h in online.average.items()}, "weight": online.weight}
    (nlls(case, model, batches[1]).mean() * float("inf")).backward()
    assert not online.step(scale=1024.0)
    assert online.measurements == 1
    assert online.weight == before["weight"]
    assert_all_same(online.average, before["average"], 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("classes", [10, 1000, 20000])
@pytest.mark.parametrize("margin", [0.0, 3.0, 8.0])
def test_label_smoothing_is_seen_among_many_classes_and_nothing_is_seen_in_plain_cross_entropy(
    margin: float, classes: int, dtype: torch.dtype
):
    y = torch.randint(classes, (32,))
    f = (torch.randn(32, classes) + margin * F.one_hot(y, classes)).to(dtype).requires_grad_()
    F.cross_entropy(f, y).backward()
    assert f.grad is not None
    reading = read_loss(Classification(), f.detach(), f.grad)
    assert reading is not None
    assert reading[0] == pytest.approx(1 / 32, rel=1e-4 if dtype == torch.float32 else 0.02)
    if dtype == torch.bfloat16:  # smoothing is within what rounding does to these
        return
    f.grad = None
    F.cross_entropy(f, y, label_smoothing=0.1).backward()
    with pytest.raises(ValueError, match="label smoothing"):
        read_loss(Classification(), f.detach(), f.grad)


def test_outputs_without_a_row_have_nothing_to_read():
    assert read_loss(Classification(), torch.zeros(0, 5), torch.zeros(0, 5)) is None
