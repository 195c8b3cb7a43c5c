"""The posterior as an object: what it accepts, what it keeps, what it says when things do not fit."""

import math

import pytest
import torch
from torch import nn

from shaver import io
from shaver.curvature.blocks import Curvature, DiagonalBlock
from shaver.evidence import Posterior, log_evidence
from tests.evidence.evidence_cases import KINDS, STRUCTURES, make_curvature, make_theta, random_prior


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_posterior_is_the_same_posterior(kind, structure, tmp_path):
    posterior = Posterior(make_curvature(structure), random_prior(kind), make_theta(), temperature=0.3)
    posterior.save(tmp_path / "posterior.safetensors")
    loaded = Posterior.load(tmp_path / "posterior.safetensors")
    assert loaded.log_evidence == posterior.log_evidence
    assert loaded.temperature == 0.3
    for name, precision in posterior.precision().items():
        assert torch.equal(loaded.precision()[name], precision)
        assert torch.equal(loaded.gamma()[name], posterior.gamma()[name])


def test_another_file_is_refused(tmp_path):
    io.save_state(tmp_path / "other", {"weights": torch.ones(2)})
    with pytest.raises(ValueError, match="holds no posterior"):
        Posterior.load(tmp_path / "other")


def test_scalar_dict_and_prior_say_the_same():
    model = nn.Linear(3, 2).double()
    curvature = Curvature(
        {n: DiagonalBlock(torch.rand_like(p.detach())) for n, p in model.named_parameters()}, -3.0, 9, "diag", "ggn"
    )
    one = log_evidence(model, curvature, prior_precision=2.0)
    assert one == log_evidence(model, curvature, prior_precision={"weight": 2.0, "bias": torch.full((2,), 2.0)})
    assert one == log_evidence(model, curvature, prior_precision=torch.tensor(2.0))
    assert one != log_evidence(model, curvature, prior_precision={"weight": 2.0, "bias": 3.0})


def test_relevance_is_the_share_of_weights_worth_more_than_one():
    theta = {"w": torch.tensor([1.0, 0.1, 2.0, 0.0])}
    posterior = Posterior(
        Curvature({"w": DiagonalBlock(torch.tensor([3.0, 3.0, 0.01, 1e9]))}, 0.0, 1, "diag", "ef"), 0.5, theta
    )
    assert posterior.relevance() == 0.5  # S = 3.5, 0.035, 2.04, 0


def test_half_precision_weights_are_measured_in_float32():
    theta = {"w": torch.randn(50, dtype=torch.bfloat16)}
    curvature = Curvature({"w": DiagonalBlock(torch.rand(50).bfloat16())}, 0.0, 1, "diag", "ef")
    exact = Curvature({"w": DiagonalBlock(curvature.blocks["w"].values.double())}, 0.0, 1, "diag", "ef")
    expected = Posterior(exact, 0.01, {"w": theta["w"].double()}).log_evidence
    assert Posterior(curvature, 0.01, theta).log_evidence == pytest.approx(expected, rel=1e-5)


def test_what_does_not_belong_together_is_named():
    curvature, theta = make_curvature("kron"), make_theta()
    with pytest.raises(ValueError, match=r"block for 'scale', which is not among the weights"):
        Posterior(curvature, 1.0, {n: t for n, t in theta.items() if n != "scale"})
    with pytest.raises(ValueError, match=r"'norm.weight' has shape \(3,\), but its curvature has \(4,\)"):
        Posterior(curvature, 1.0, theta | {"norm.weight": torch.ones(3)})
    with pytest.raises(ValueError, match=r"lacks 'conv.bias'.* and the curvature lacks 'conv.biass'"):
        Posterior(curvature, {n if n != "conv.bias" else "conv.biass": 1.0 for n in theta}, theta)
    with pytest.raises(ValueError, match=r"precision of 'norm.weight' has shape \(7,\)"):
        Posterior(curvature, dict.fromkeys(theta, 1.0) | {"norm.weight": torch.ones(7)}, theta)
    with pytest.raises(ValueError, match=r"precision of 'norm.weight' is not positive"):
        Posterior(curvature, dict.fromkeys(theta, 1.0) | {"norm.weight": 0.0}, theta)


def test_a_diverged_evidence_is_named():
    theta = make_theta()
    theta["embedding.weight"][1, 1] = math.nan
    with pytest.raises(FloatingPointError, match=r"evidence of 'embedding.weight' is nan"):
        _ = Posterior(make_curvature("diag"), 1.0, theta).log_evidence
    curvature = make_curvature("diag")
    curvature.log_likelihood = math.nan
    with pytest.raises(FloatingPointError, match="log likelihood is nan"):
        _ = Posterior(curvature, 1.0, make_theta()).log_evidence
