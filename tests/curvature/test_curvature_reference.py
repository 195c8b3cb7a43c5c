"""The reference itself: closed forms it must reproduce, so that agreeing with it means something."""

import pytest
import torch
from torch import nn

from tests.curvature.cases import BY_NAME, CASES, CONV, Case
from tests.curvature.reference import Problem, assert_same, patches


def test_linear_regression_has_the_normal_matrix_as_ggn():
    x, y = torch.randn(7, 3, dtype=torch.float64), torch.randn(7, 1, dtype=torch.float64)
    problem = Problem(nn.Linear(3, 1).double(), [(x, y)], "regression")
    design = torch.cat([x, torch.ones(7, 1)], 1)
    assert_same(problem.dense("ggn"), design.T @ design, "XᵀX")


def test_logistic_regression_ggn_is_the_hessian():
    case = BY_NAME["mlp"]
    model = nn.Linear(4, 3).double()
    problem = case.problem(model, case.batches())
    parameters = problem.parameters

    def loss(flat: torch.Tensor) -> torch.Tensor:
        named = {"weight": flat[:12].reshape(3, 4), "bias": flat[12:]}
        return sum(problem.nll(problem.outputs(named, x), y) for x, y in problem.samples())

    flat = torch.cat([parameters["weight"].flatten(), parameters["bias"]])
    assert_same(problem.dense("ggn"), torch.func.hessian(loss)(flat), "hessian")


@pytest.mark.parametrize("source", ["ggn", "ef"])
def test_diagonal_is_the_diagonal_of_the_dense_matrix(source: str):
    case = BY_NAME["called-twice"]
    problem = case.problem(case.model(), case.batches())
    flat = torch.cat([values.flatten() for values in problem.diagonal(source).values()])
    assert_same(flat, problem.dense(source).diagonal(), source)


SINGLE = [case for case in CONV if case.name.startswith(("conv1d", "conv2d", "conv3d"))]


@pytest.mark.parametrize("case", SINGLE, ids=lambda case: case.name)
def test_patches_times_weight_is_the_convolution(case: Case):
    conv = case.model()[0]
    x = case.batches((1,))[0][0]
    seen = torch.stack(patches(conv, x), 1)  # (groups, positions, in)
    weight = conv.weight.reshape(conv.groups, -1, seen.shape[-1])
    out = (seen @ weight.mT).mT.reshape(conv.out_channels, -1)
    bias = 0 if conv.bias is None else conv.bias.unsqueeze(1)
    assert_same(out + bias, conv(x)[0].flatten(1), "convolution")


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
def test_kronecker_of_one_sample_and_position_is_exact(sharing: str):
    case = BY_NAME["mlp"]
    problem = case.problem(case.model(), case.batches((1,)))
    for name, (A, G) in problem.kronecker("ggn", sharing).items():
        assert_same(torch.kron(G[0], A[0]), problem.block("ggn", name), name)


def test_every_case_names_its_own_parameters():
    for case in CASES:
        known = {name for name, _ in case.model().named_parameters()}
        assert case.generic | case.frozen <= known, case.name
