"""All eight combinations on every network of the zoo, from real curvature."""

import math

import pytest
import torch

from shaver import zoo
from shaver.curvature import estimate
from shaver.evidence import Posterior, improve
from shaver.priors import make_prior
from tests.evidence.evidence_cases import KINDS, STRUCTURES

SMALL = {
    "fcn": ({"inputs": 12, "hidden": [7, 5], "classes": 3}, (12,)),
    "lenet": ({"classes": 3}, (1, 28, 28)),
    "lenet_caffe": ({"classes": 3, "widths": [2, 3, 4]}, (1, 28, 28)),
    "digits_cnn": ({"classes": 3}, (1, 8, 8)),
    "mixer": ({"image_size": 8, "patch_size": 2, "dim": 6, "token_dim": 5, "channel_dim": 7, "classes": 3}, (1, 8, 8)),
    "resnet18_fixup": ({"planes": 4, "classes": 3}, (3, 16, 16)),
    "resnet18": ({"planes": 4, "classes": 3}, (3, 16, 16)),
    "wrn16_fixup": ({"widen": 1, "classes": 3}, (3, 8, 8)),
    "wrn16": ({"widen": 1, "classes": 3}, (3, 8, 8)),
    "vit": ({"image_size": 8, "patch_size": 4, "dim": 8, "heads": 2, "mlp_dim": 9, "classes": 3}, (1, 8, 8)),
}


@pytest.mark.parametrize("structure", STRUCTURES)
@pytest.mark.parametrize("network", zoo.names())
def test_every_prior_learns_on_every_network(network, structure):
    arguments, shape = SMALL[network]
    model = zoo.build(network, seed=0, **arguments)
    generator = torch.Generator().manual_seed(0)
    batch = (torch.randn(6, *shape, generator=generator), torch.randint(3, (6,), generator=generator))
    curvature = estimate(model, [batch], structure=structure, source="ef")
    theta = dict(model.named_parameters())
    reached = {}
    for kind in KINDS:
        prior = make_prior(kind, theta)
        before = Posterior(curvature, prior, theta).log_evidence
        posterior = improve(prior, curvature, theta, steps=5)
        reached[kind] = posterior.log_evidence
        assert reached[kind] > before
        assert 0 <= posterior.effective_parameters <= sum(p.numel() for p in theta.values())
        for name, precision in posterior.precision().items():
            assert precision.shape == theta[name].shape
            assert bool((precision > 0).all())
            assert bool(precision.isfinite().all())
    assert all(math.isfinite(value) for value in reached.values())
    assert reached["layer"] >= reached["scalar"] - 0.1  # each contains the other
