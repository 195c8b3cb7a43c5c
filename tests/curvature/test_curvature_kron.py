"""Kronecker factors: equal to their definition by loops, and to the dense matrix where theory says so."""

import pytest
import torch

from shaver import curvature
from shaver.curvature import DiagonalBlock, KroneckerBlock
from tests.curvature.cases import BY_NAME, CASES, Case
from tests.curvature.reference import assert_same


def compute(case: Case, model: torch.nn.Module, batches: list, **options: object) -> curvature.Curvature:
    return curvature.estimate(model, batches, case.likelihood, structure="kron", **case.reading, **options)


#: Uses in ``F.linear`` and on a table that all samples share: the reference has no factors for them, only a diagonal.
UNSEEN = ("in_proj", "out_proj", "project.")
COPIED = "diagonal: one copy per sample"


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("source", ["ggn", "ef"])
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_factors_follow_their_definition(case: Case, source: str, sharing: str):
    model, batches = case.model(), case.batches()
    problem = case.problem(model, batches)
    factors, diagonal = problem.kronecker(source, sharing), problem.diagonal(source)
    scale = max(float(values.max()) for values in diagonal.values())
    result = compute(case, model, batches, source=source, sharing=sharing)
    assert list(result.blocks) == list(diagonal)
    for name, block in result:
        if isinstance(block, KroneckerBlock) and any(part in name for part in UNSEEN):
            continue
        if isinstance(block, KroneckerBlock) and not diagonal[name].any():  # a draw in which no gradient reaches it
            assert not block.diagonal().any(), name
            continue
        has_factors = name in factors and name not in case.generic and result.rules[name] != COPIED
        assert type(block) is (KroneckerBlock if has_factors else DiagonalBlock), name
        if isinstance(block, KroneckerBlock):
            A, G = factors[name]
            assert block.shape == diagonal[name].shape
            assert_same(block.A, A, f"{name} A")
            assert_same(block.G, G, f"{name} G", scale=scale)
        else:
            assert_same(block.diagonal(), diagonal[name], name, scale=scale)
    assert result.log_likelihood == pytest.approx(problem.log_likelihood(), rel=1e-10)
    assert result.data_size == 5


@pytest.mark.parametrize("source", ["ggn", "ef"])
@pytest.mark.parametrize("name", ["mlp", "conv2d-one-position", "conv1d-transformers", "regression"])
def test_one_sample_at_one_position_is_exact(name: str, source: str):
    case = BY_NAME[name]
    model, batches = case.model(), case.batches((1,))
    if name == "conv1d-transformers":
        batches = [(batches[0][0][:, :1], batches[0][1])]
    problem = case.problem(model, batches)
    for parameter, block in compute(case, model, batches, source=source):
        A, G = block.A[0], block.G[0]
        kron = torch.kron(A, G) if block.transposed else torch.kron(G, A)
        assert_same(kron, problem.block(source, parameter), parameter, 1e-9)


@pytest.mark.parametrize("name", ["linear-positions", "conv2d"])
def test_reduce_is_exact_for_one_sample_of_a_mean_over_positions_of_a_linear_network(name: str):
    case = BY_NAME[name]
    model = case.model()
    for index, module in enumerate(model):
        if isinstance(module, torch.nn.Tanh):
            model[index] = torch.nn.Identity()
    batches = case.batches((1,))
    problem = case.problem(model, batches)
    for parameter, block in compute(case, model, batches, sharing="reduce"):
        assert_same(torch.kron(block.G[0], block.A[0]), problem.block("ggn", parameter), parameter, 1e-9)


def test_a_linear_network_under_squared_error_has_exact_kronecker_blocks():
    """Without nonlinearity J_outᵀ Λ J_out does not depend on the sample, so A ⊗ G is the GGN for any data."""
    case = BY_NAME["regression"]
    model = torch.nn.Sequential(torch.nn.Linear(4, 5), torch.nn.Linear(5, 3)).double()
    batches = case.batches((4, 3))
    problem = case.problem(model, batches)
    for parameter, block in compute(case, model, batches):
        assert_same(torch.kron(block.G[0], block.A[0]), problem.block("ggn", parameter), parameter, 1e-9)


def test_expand_is_the_default():
    case = BY_NAME["linear-positions"]
    model, batches = case.model(), case.batches()
    default = compute(case, model, batches)
    expand, reduce = (compute(case, model, batches, sharing=sharing) for sharing in ("expand", "reduce"))
    assert torch.equal(default.blocks["0.weight"].A, expand.blocks["0.weight"].A)
    assert not torch.allclose(default.blocks["0.weight"].A, reduce.blocks["0.weight"].A)


@pytest.mark.parametrize("name", ["lenet", "conv1d-transformers", "grouped-net"])
def test_the_diagonal_of_a_block_is_the_diagonal_of_its_kronecker_product(name: str):
    case = BY_NAME[name]
    for parameter, block in compute(case, case.model(), case.batches()):
        if isinstance(block, DiagonalBlock):
            continue
        products = [torch.kron(G, A).diagonal() for A, G in zip(block.A, block.G, strict=True)]
        matrix = torch.stack(products).reshape(len(block.A), block.G.shape[-1], block.A.shape[-1])
        assert_same(block.diagonal(), block.from_matrix(matrix), parameter)
