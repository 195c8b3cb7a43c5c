"""Language models of other people: exact curvature by fast rules, from estimates and from training's own passes."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shaver.batches import forward_of, next_tokens
from shaver.curvature import OnlineCurvature, estimate
from shaver.likelihoods import Classification
from tests.curvature.languages import CAUSAL, CLASSIFIERS, build, mixtral, one_by_one, tokens
from tests.curvature.reference import assert_all_same

FAMILIES = [(name, False) for name in CLASSIFIERS] + [(name, True) for name in CAUSAL]
N = 40


def tolerance(name: str, single: bool = False) -> float:
    """Llama normalises, and the library's causal loss is computed, in single precision, whatever the weights'."""
    return 3e-5 if single or "llama" in name else 1e-9


def prepare(name: str, causal: bool, samples: int = 4) -> tuple[nn.Module, dict[str, Tensor]]:
    return build((CAUSAL if causal else CLASSIFIERS)[name]), tokens(samples, causal)


def empirical(model: nn.Module, batch: dict[str, Tensor], causal: bool) -> tuple[dict[str, Tensor], float]:
    """Σ_n g_n² by one ordinary backward pass a sample; and the log likelihood."""
    total = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    likelihood = 0.0
    for sample in one_by_one(batch):
        logits, labels = model(**sample).logits, sample["labels"]
        pairs = (logits[0, :-1], labels[0, 1:]) if causal else (logits, labels)
        loss = F.cross_entropy(*pairs, reduction="sum")
        grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)
        likelihood -= float(loss.detach())
        for name, grad in zip(total, grads, strict=True):
            total[name] += 0 if grad is None else grad.square()
    return total, likelihood


@pytest.mark.parametrize(("name", "causal"), FAMILIES)
def test_the_empirical_fisher_is_exact(name: str, causal: bool):
    model, batch = prepare(name, causal)
    found = estimate(model, [batch], source="ef", **({"targets": next_tokens} if causal else {}))
    diagonal, likelihood = empirical(model.eval(), batch, causal)
    assert_all_same(found.diagonal(), diagonal, tolerance(name))
    assert found.log_likelihood == pytest.approx(likelihood, rel=tolerance(name))
    assert not [rule for rule in found.rules.values() if "generic" in rule]


@pytest.mark.parametrize(("name", "causal"), [("bert", False), ("gpt2", True), ("llama tied", True)])
def test_the_generalised_gauss_newton_is_exact(name: str, causal: bool):
    model, batch = prepare(name, causal, 2)
    found = estimate(model, [batch], source="ggn", **({"targets": next_tokens} if causal else {}))
    expected = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for sample in one_by_one(batch):
        outputs = forward_of(model.eval(), sample)
        counts = (next_tokens(sample) != -100).flatten() if causal else torch.ones(1, dtype=torch.bool)
        for logits in outputs.flatten(0, -2)[counts]:
            p = logits.detach().softmax(-1)
            values, vectors = torch.linalg.eigh(torch.diag(p) - torch.outer(p, p))
            for column in (vectors * values.clamp_min(0).sqrt()).T:
                grads = torch.autograd.grad(
                    logits, list(model.parameters()), column, retain_graph=True, allow_unused=True
                )
                for key, grad in zip(expected, grads, strict=True):
                    expected[key] += 0 if grad is None else grad.square()
    assert_all_same(found.diagonal(), expected, tolerance(name))


@pytest.mark.parametrize("own_loss", [True, False], ids=["the model's loss", "a loss of one's own"])
@pytest.mark.parametrize(("name", "causal"), FAMILIES)
def test_a_measured_training_step_gives_the_same(name: str, causal: bool, own_loss: bool):
    model, batch = prepare(name, causal)
    diagonal, likelihood = empirical(model, batch, causal)
    online = OnlineCurvature(model, N, source="ef", every=1, decay=0.0)
    if own_loss:
        loss = model(**batch).loss
    else:
        logits = model(**{key: value for key, value in batch.items() if key != "labels"}).logits
        labels = next_tokens(batch) if causal else batch["labels"]
        loss = F.cross_entropy(logits.flatten(0, -2), labels.flatten())
    loss.backward()
    online.step()
    found = online.curvature()
    allowed = tolerance(name, causal and own_loss)
    assert_all_same(found.diagonal(), {key: N / 4 * h for key, h in diagonal.items()}, allowed)
    assert found.log_likelihood == pytest.approx(N / 4 * likelihood, rel=allowed)
    counted = int((next_tokens(batch) != -100).sum()) if causal else 4
    assert online.weight == pytest.approx(4 / counted, rel=allowed)  # a token's mean counts a sample that often


@pytest.mark.parametrize(("name", "causal"), [("bert", False), ("gpt2", True)])
def test_labels_drawn_for_every_token_are_unbiased_for_the_gauss_newton(name: str, causal: bool):
    model, batch = prepare(name, causal, 3)
    reading = {"targets": next_tokens} if causal else {}
    exact = estimate(model, [batch], source="ggn", **reading).diagonal()
    online = OnlineCurvature(model, 3, source="mc", every=1, decay=0.999)
    for _ in range(150):
        model(**batch).loss.backward()
        online.step()
    found = online.curvature().diagonal()
    ratio = sum(float(h.sum()) for h in found.values()) / sum(float(h.sum()) for h in exact.values())
    assert ratio == pytest.approx(1, abs=0.1)
    # a token that is ignored adds nothing: without its mask the ratio would be near the share of tokens that count
    assert not causal or float((next_tokens(batch) != -100).double().mean()) < 0.8


def test_outputs_may_be_picked_out_of_what_the_model_returns():
    model, batch = prepare("gpt2", True)
    expected, _ = empirical(model, batch, True)
    online = OnlineCurvature(model, 4, source="ef", every=1, decay=0.0, outputs=lambda result: result[1])
    model(**batch, return_dict=False)[0].backward()
    online.step()
    assert_all_same(online.curvature().diagonal(), expected, tolerance("gpt2", single=True))


def test_a_batch_of_another_length_or_with_positions_of_its_own_is_exact_too():
    model, batch = prepare("gpt2", True)
    online = OnlineCurvature(model, 4, source="ef", every=1, decay=0.0)
    for extra in ({}, {"position_ids": torch.arange(1, 6).expand(4, 5).clone()}):
        for length in (5, 3):
            part = {key: value[:, :length] for key, value in (batch | extra).items()}
            model.zero_grad()
            model(**part).loss.backward()
            online.step()
            with online.paused():
                expected, _ = empirical(model, part, True)
            assert_all_same(online.curvature().diagonal(), expected, tolerance("gpt2", single=True))


def test_next_tokens_are_the_labels_one_to_the_left():
    labels = torch.tensor([[5, 6, 7], [8, 9, -100]])
    assert next_tokens({"labels": labels}).tolist() == [[6, 7, -100], [9, -100, -100]]
    assert Classification().ignore_index == -100


@pytest.mark.parametrize("source", ["ef", "mc"])
def test_a_large_vocabulary_is_read_and_drawn_piece_by_piece(monkeypatch: pytest.MonkeyPatch, source: str):
    """Positions times vocabulary outgrow the network: the same numbers come out of a few rows at a time."""
    found = []
    for piece in (10**9, 40):
        monkeypatch.setattr("shaver.curvature.loss_scale.PIECE", piece)
        monkeypatch.setattr("shaver.likelihoods.PIECE", piece)
        monkeypatch.setattr("shaver.curvature.kernels.TILE", 10 * piece)
        model, batch = prepare("gpt2", True)
        online = OnlineCurvature(model, N, source=source, every=1, decay=0.0)
        model(**batch).loss.backward()
        online.step()
        found.append(online.curvature())
    whole, pieces = found
    assert pieces.log_likelihood == pytest.approx(whole.log_likelihood, rel=1e-12)
    if source == "ef":
        assert_all_same(pieces.diagonal(), whole.diagonal())
    else:  # other labels are drawn, from the same probabilities
        for h, expected in zip(pieces.diagonal().values(), whole.diagonal().values(), strict=True):
            assert 0.2 < float(h.sum() / expected.sum()) < 5


def test_a_mixture_of_experts_in_double_precision():
    """Mixtral normalises and routes in single precision, whatever the weights'."""
    model, batch = build(mixtral), tokens(4, causal=False)
    model.set_experts_implementation("eager")
    expected, _ = empirical(model.eval(), batch, False)
    assert_all_same(estimate(model, [batch], source="ef").diagonal(), expected, 3e-5)
    online = OnlineCurvature(model.train(), 4, source="ef", every=1, decay=0.0)
    for part in ({key: value[:3] for key, value in batch.items()}, batch):
        model.zero_grad()
        model(**part).loss.backward()
        online.step()
    assert_all_same(online.curvature().diagonal(), expected, 3e-5)


def test_a_network_that_cannot_run_in_its_precision_is_described():
    """The experts of Mixtral run in float32 or less by default: the library's own answer to a float64 network."""
    with pytest.raises(ValueError, match=r"cannot process a batch with tensors \(3, 5\) int64.*Double"):
        estimate(build(mixtral), [tokens(4, causal=False)])
