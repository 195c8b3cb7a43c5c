"""OPD and OBD against dense precision matrices, for diagonal and for Kronecker-factored curvature."""

import pytest
import torch
from torch import nn

from shaver.criteria import score
from shaver.curvature import Curvature, DiagonalBlock, KroneckerBlock, estimate
from shaver.evidence import Posterior


def spd(n, seed):
    root = torch.randn(n, n, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return root @ root.T


def build(structure):
    model = nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double()
    blocks, dense = {}, {}
    for seed, (name, parameter) in enumerate(model.named_parameters()):
        if structure == "kron" and parameter.ndim == 2:
            out, inputs = parameter.shape
            A, G = spd(inputs, seed), spd(out, seed + 10)
            blocks[name] = KroneckerBlock(A[None], G[None], parameter.shape)
            dense[name] = torch.kron(G, A)  # row-major flattening of (out, in)
        else:
            values = torch.rand(parameter.shape, dtype=torch.float64)
            blocks[name] = DiagonalBlock(values)
            dense[name] = torch.diag(values.flatten())
    delta = {name: torch.rand_like(parameter) + 0.1 for name, parameter in model.named_parameters()}
    curvature = Curvature(blocks, -1.0, 10, structure, "ggn")
    return model, Posterior(curvature, delta, dict(model.named_parameters())), dense, delta


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_opd_is_the_posterior_precision_times_the_squared_weight(structure):
    model, posterior, dense, delta = build(structure)
    for name, scores in score(model, "opd", posterior=posterior).items():
        weight = model.get_parameter(name).detach().flatten()
        precision = (dense[name] + torch.diag(delta[name].flatten())).diagonal()
        torch.testing.assert_close(scores.flatten(), precision * weight**2)


@pytest.mark.parametrize("structure", ["diag", "kron"])
def test_obd_leaves_the_prior_out(structure):
    model, posterior, dense, _ = build(structure)
    for name, scores in score(model, "obd", posterior=posterior).items():
        weight = model.get_parameter(name).detach().flatten()
        steps = torch.diag(weight)  # one weight set to zero in each row
        rise = 0.5 * torch.einsum("pi,ij,pj->p", steps, dense[name], steps)
        torch.testing.assert_close(scores.flatten(), rise)


def test_opd_of_a_map_network_from_a_post_hoc_estimate():
    """The exact GGN of logistic regression, written out."""
    torch.manual_seed(0)
    model = nn.Linear(3, 2, bias=False).double()
    x, y = torch.randn(6, 3, dtype=torch.float64), torch.randint(0, 2, (6,))
    posterior = Posterior(estimate(model, [(x, y)]), 0.7, dict(model.named_parameters()))
    p = model(x).softmax(1).detach()
    h = torch.einsum("nc,ni->ci", p * (1 - p), x**2)
    expected = (h + 0.7) * model.weight.detach() ** 2
    torch.testing.assert_close(score(model, "opd", posterior=posterior)["weight"], expected)


def test_a_posterior_of_another_model_is_refused():
    _, posterior, _, _ = build("diag")
    with pytest.raises(ValueError, match=r"no precision for the weight 'weight'"):
        score(nn.Linear(3, 4), "opd", posterior=posterior)
    with pytest.raises(ValueError, match=r"shape \(4, 3\), the weight \(4, 1\)"):
        score(nn.Sequential(nn.Linear(1, 4), nn.Tanh(), nn.Linear(4, 2)).double(), "opd", posterior=posterior)
