"""Curvature from training's own passes by drawn labels: one more backward pass, unbiased for the GGN."""

import pytest
import torch
from torch import Tensor, nn

from shaver.likelihoods import Classification, get_likelihood
from tests.curvature.cases import BY_NAME, Case, normal
from tests.curvature.online_cases import (
    LOSSES,
    N,
    assert_step,
    by_hand,
    expected,
    forward,
    nlls,
    online_for,
    prepare,
)
from tests.curvature.reference import assert_all_same

SAMPLED = ["mlp", "lenet", "tied-language-model", "vision-transformer", "attention-batch-first", "bilinear-form"]


@pytest.mark.parametrize("streamed", [False, True], ids=["side by side", "as it comes by"])
@pytest.mark.parametrize("loss", ["mean", "scaled"])
@pytest.mark.parametrize("name", [*SAMPLED, "shared-branches", "called-twice", "siblings"])
def test_mc_squares_the_gradient_of_drawn_labels(monkeypatch: pytest.MonkeyPatch, name: str, loss: str, streamed: bool):
    if streamed:  # as for networks whose layers' outputs are too many to hold all their gradients
        monkeypatch.setattr("shaver.curvature.kernels.STREAMED", 0)
    case, model, (batch,) = prepare(name)
    with torch.no_grad():
        outputs = forward(case, model, batch)
    drawn = get_likelihood(case.likelihood).mc_gradient(outputs, torch.Generator().manual_seed(3))
    diagonal = {n: N / 5 * h for n, h in by_hand(case, model, batch, drawn).items()}
    online = online_for(model, source="mc", seed=3)
    make, weight = LOSSES[loss]
    with online.measure():
        make(nlls(case, model, batch)).backward()
    assert_all_same(online.curvature().diagonal(), diagonal)
    assert online.curvature().log_likelihood == pytest.approx(expected(case, model, [batch])[1], rel=1e-10)
    assert online.weight == pytest.approx(weight, rel=1e-9)


def test_mc_draws_no_label_where_one_is_ignored():
    case, model, (batch,) = prepare("token-labels")
    with torch.no_grad():
        outputs = forward(case, model, batch)
    drawn = Classification().mc_gradient(outputs, torch.Generator().manual_seed(3))
    ignored = (batch[1] == -100).unsqueeze(-1)
    assert ignored.any()
    diagonal = {n: N / 5 * h for n, h in by_hand(case, model, batch, drawn.masked_fill(ignored, 0.0)).items()}
    for loss in ("auto", "mean"):
        online = online_for(model, source="mc", seed=3, loss=loss)
        with online.measure():
            nlls(case, model, batch).mean().backward()
        assert_all_same(online.curvature().diagonal(), diagonal)
        online.close()


class OnlyGeneric(nn.Module):
    """Not one parameter has a rule of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.ConvTranspose1d(2, 3, 2, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv(x).tanh().mean(-1)


@pytest.mark.parametrize("source", ["ef", "mc"])
def test_a_model_that_is_all_generic(source: str):
    case = Case("only-generic", OnlyGeneric, normal(2, 3))
    model, (batch,) = case.model(), case.batches((5,))
    online = online_for(model, source=source, seed=3)
    with online.measure():
        nlls(case, model, batch).mean().backward()
    assert "generic" in online.curvature().rules["conv.weight"]
    if source == "ef":
        return assert_step(online, case, [batch])
    drawn = Classification().mc_gradient(model(batch[0]).detach(), torch.Generator().manual_seed(3))
    diagonal = {n: N / 5 * h for n, h in by_hand(case, model, batch, drawn).items()}
    assert_all_same(online.curvature().diagonal(), diagonal)


def test_mc_goes_to_the_ggn_within_its_standard_error():
    case, model, (batch,) = prepare("mlp")
    online = online_for(model, source="mc")
    diagonals = []
    for _ in range(300):
        with online.measure():
            nlls(case, model, batch).mean().backward()
        diagonals.append(torch.cat([h.flatten() for h in online.curvature().diagonal().values()]))
    draws = torch.stack(diagonals)
    ggn, ef = (
        torch.cat([h.flatten() for h in expected(case, model, [batch], source)[0].values()]) for source in ("ggn", "ef")
    )
    error = draws.std(0) / len(draws) ** 0.5
    noisy = error > 1e-9 * ggn.max()
    assert ((draws.mean(0) - ggn)[noisy] / error[noisy]).abs().max() < 5
    assert ((draws.mean(0) - ef)[noisy] / error[noisy]).abs().max() > 5, "the test has power"


def test_mc_follows_its_seed_and_leaves_the_global_one():
    case, model, (batch,) = prepare("vision-transformer", (40,))  # two seeds do not draw the same forty labels
    runs = []
    for seed in (1, 1, 2):
        online = online_for(model, source="mc", seed=seed)
        torch.manual_seed(5)
        before = torch.get_rng_state()
        with online.measure():
            nlls(case, model, batch).mean().backward()
        assert torch.equal(torch.get_rng_state(), before)
        runs.append(online.curvature().diagonal()["head.weight"])
        online.close()
    assert torch.equal(runs[0], runs[1])
    assert not torch.equal(runs[0], runs[2])


@pytest.mark.parametrize("source", ["ef", "mc"])
def test_dropout_is_drawn_as_without_a_measurement(source: str):
    case = BY_NAME["transformer-block"]
    model, (batch,) = case.model(), case.batches((5,))
    outcomes = []
    for measured in (False, True):
        online = online_for(model, source=source) if measured else None
        torch.manual_seed(5)
        outcomes.append((forward(case, model, batch), forward(case, model, batch)))
        if online is not None:
            online.close()
    assert torch.equal(outcomes[0][0], outcomes[1][0])
    assert torch.equal(outcomes[0][1], outcomes[1][1])
    assert not torch.equal(outcomes[0][0], outcomes[0][1])
