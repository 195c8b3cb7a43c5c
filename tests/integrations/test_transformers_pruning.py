"""Criteria, masks and files on models of the transformers library, from a local folder and with no hub."""

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as T
from torch import Tensor, nn

import shaver
from shaver.batches import next_tokens
from tests.curvature.languages import CAUSAL, CLASSIFIERS, build, one_by_one, tokens

CRITERIA = ["opd", "obd", "magnitude", "snip", "grasp", "wanda", "synflow", "random"]


def logits(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    with torch.no_grad():
        found = model.eval()(**{key: value for key, value in batch.items() if key != "labels"}).logits
    assert isinstance(found, Tensor)
    return found


def scored(model: nn.Module, criterion: str, causal: bool) -> dict[str, Tensor]:
    batches, reading = [tokens(4, causal), tokens(3, causal, seed=2)], {"targets": next_tokens} if causal else {}
    given: dict[str, Any] = {}
    if criterion in ("opd", "obd"):
        curvature = shaver.curvature.estimate(model, batches, source="ef", **reading)
        given["posterior"] = shaver.Posterior(curvature, 0.3, dict(model.named_parameters()))
    elif criterion in ("snip", "grasp", "wanda", "synflow"):
        given = {"batches": batches, **reading}
    if criterion == "synflow":
        given["rounds"] = 2
    return shaver.score(model, criterion, **given)


@pytest.mark.parametrize("criterion", CRITERIA)
@pytest.mark.parametrize(("name", "causal"), [("distilbert", False), ("gpt2", True), ("llama", True)])
def test_a_criterion_prunes_a_language_model_that_is_saved_and_reloaded(
    tmp_path: Path, name: str, causal: bool, criterion: str
):
    family = CAUSAL if causal else CLASSIFIERS
    model, batch = build(family[name]).float(), tokens(4, causal)
    dense = logits(model, batch)
    scores = scored(model, criterion, causal)
    assert not [key for key in scores if "wte" in key or "embed" in key or "norm" in key]  # and nothing tied to one
    shaver.prune(model, scores, sparsity=0.5)
    zeros = sum(int((dict(model.named_parameters())[key] == 0).sum()) for key in scores)
    assert zeros == round(0.5 * sum(s.numel() for s in scores.values()))
    assert not torch.allclose(logits(model, batch), dense, atol=1e-3)
    shaver.save(model, tmp_path / "pruned")
    again = shaver.load(tmp_path / "pruned", factory=lambda: build(family[name], seed=9).float())
    torch.testing.assert_close(logits(again, batch), logits(model, batch))


def test_snip_of_a_causal_model_is_theta_times_the_gradient_of_its_own_loss():
    model, batch = build(CAUSAL["gpt2"]), tokens(4, True)
    found = scored_once(model, batch)
    model.eval()
    counted = int((batch["labels"][:, 1:] != -100).sum())
    total = sum(model(**sample).loss * int((sample["labels"][:, 1:] != -100).sum()) for sample in one_by_one(batch))
    assert counted < batch["labels"].numel()
    names = list(found)
    weights = [dict(model.named_parameters())[name] for name in names]
    for name, weight, grad in zip(names, weights, torch.autograd.grad(total, weights), strict=True):
        expected = (weight * grad).abs().detach()
        ratio = found[name].sum() / expected.sum()
        torch.testing.assert_close(found[name], expected * ratio, rtol=1e-4, atol=1e-6 * float(found[name].max()))


def scored_once(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    return shaver.score(model, "snip", batches=[batch], targets=next_tokens)


def test_a_local_folder_is_all_that_is_needed(tmp_path: Path):
    assert os.environ["HF_HUB_OFFLINE"] == "1"
    batch = tokens(4, False)
    build(CLASSIFIERS["bert"]).float().save_pretrained(tmp_path / "dense")

    def factory() -> nn.Module:
        model = T.AutoModelForSequenceClassification.from_pretrained(tmp_path / "dense")
        assert isinstance(model, nn.Module)
        return model

    model = factory()
    shaver.prune(model, shaver.score(model, "magnitude"), sparsity=0.8)
    shaver.save(model, tmp_path / "sparse")
    again = shaver.load(tmp_path / "sparse", factory=factory)
    torch.testing.assert_close(logits(again, batch), logits(model, batch))
    assert not torch.allclose(logits(again, batch), logits(factory(), batch), atol=1e-3)


@pytest.mark.parametrize("criterion", ["snip", "grasp"])
def test_a_batch_without_labels_is_named(criterion: str):
    batch = {key: value for key, value in tokens(4, False).items() if key != "labels"}
    with pytest.raises(KeyError, match=r"needs the key 'labels'; this one has 'input_ids', 'attention_mask'"):
        shaver.score(build(CLASSIFIERS["bert"]), criterion, batches=[batch])


def test_labels_of_a_causal_model_that_are_not_shifted_make_another_loss():
    """What next_tokens is for: without it a model is scored for repeating the word it has just read."""
    model, batch = build(CAUSAL["gpt2"]), tokens(4, True)
    shifted, unshifted = scored_once(model, batch), shaver.score(model, "snip", batches=[batch])
    assert any(not torch.allclose(shifted[name], unshifted[name], rtol=0.1) for name in shifted)
