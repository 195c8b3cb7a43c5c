"""Other libraries as oracles. BackPACK's KFAC is mis-scaled for convolutions, so only its diagonal is asked."""

import pytest
import torch
from torch import Tensor, nn

from shaver import curvature
from tests.curvature.cases import BY_NAME, Case
from tests.curvature.reference import assert_same

NAMES = ["mlp", "lenet"]
TOLERANCE = 1e-8  # two independent computations, each with its own order of summation


def loss() -> nn.Module:
    return nn.CrossEntropyLoss(reduction="sum")


def product(block: curvature.KroneckerBlock) -> Tensor:
    return torch.kron(block.G[0], block.A[0])


def backpack_diagonal(case: Case, batches: list, source: str) -> dict[str, Tensor]:
    peer = pytest.importorskip("backpack")
    extensions = pytest.importorskip("backpack.extensions")
    model, criterion = peer.extend(case.model().eval()), peer.extend(loss())
    extension = extensions.DiagGGNExact() if source == "ggn" else extensions.SumGradSquared()
    total: dict[str, Tensor] = {}
    for x, y in batches:
        with peer.backpack(extension):
            criterion(model(x), y).backward()
        for name, p in model.named_parameters():
            total[name] = total.get(name, 0) + getattr(p, extension.savefield)
    return total


def asdl_statistics(model: nn.Module, x: Tensor, y: Tensor, source: str, shape: str) -> dict[str, object]:
    """ASDL's statistics of one batch, by module name."""
    fisher = pytest.importorskip("asdl.fisher")
    kind = {"ggn": "fisher_exact", "ef": "fisher_emp"}[source]
    options = {"fisher_type": kind, "loss_type": "cross_entropy", "fisher_shapes": [shape], "data_size": 1}
    maker = fisher.get_fisher_maker(model, fisher.FisherConfig(**options))
    outputs = maker.setup_model_call(model, x)
    if source == "ef":
        maker.setup_loss_call(loss(), outputs, y)
    maker.forward_and_backward()
    return {name: module.fisher for name, module in model.named_modules() if hasattr(module, "fisher")}


@pytest.mark.parametrize("source", ["ggn", "ef"])
@pytest.mark.parametrize("name", NAMES)
def test_diagonal_equals_backpack(name: str, source: str):
    case = BY_NAME[name]
    batches = case.batches((4, 3))
    expected = backpack_diagonal(case, batches, source)
    for parameter, values in curvature.estimate(case.model(), batches, source=source).diagonal().items():
        assert_same(values, expected[parameter], parameter, TOLERANCE)


@pytest.mark.parametrize("source", ["ggn", "ef"])
@pytest.mark.parametrize("name", NAMES)
def test_diagonal_equals_asdl(name: str, source: str):
    case = BY_NAME[name]
    (x, y), *_ = batches = case.batches((5,))
    result = curvature.estimate(case.model(), batches, source=source).diagonal()
    for module, statistics in asdl_statistics(case.model().eval(), x, y, source, "diag").items():
        expected = statistics.diag.weight
        assert_same(result[f"{module}.weight"], expected.reshape(result[f"{module}.weight"].shape), module, TOLERANCE)


@pytest.mark.parametrize("sharing", ["expand", "reduce"])
@pytest.mark.parametrize("source", ["ggn", "ef"])
@pytest.mark.parametrize("name", NAMES)
def test_kronecker_blocks_equal_curvlinops(name: str, source: str, sharing: str):
    peer = pytest.importorskip("curvlinops")
    case = BY_NAME[name]
    model, batches = case.model().eval(), case.batches((4, 3))
    kind = {"ggn": "type-2", "ef": "empirical"}[source]
    options = {"fisher_type": kind, "kfac_approx": sharing, "check_deterministic": False}
    operator = peer.KFACLinearOperator(model, loss(), list(model.parameters()), batches, **options)
    dense = operator @ torch.eye(sum(p.numel() for p in model.parameters()), dtype=torch.float64)
    start = 0
    for parameter, block in curvature.estimate(model, batches, structure="kron", source=source, sharing=sharing):
        stop = start + block.shape.numel()
        assert_same(product(block), dense[start:stop, start:stop], parameter, TOLERANCE)
        start = stop


@pytest.mark.parametrize("source", ["ggn", "ef"])
@pytest.mark.parametrize("name", NAMES)
def test_kronecker_blocks_equal_asdl(name: str, source: str):
    case = BY_NAME[name]
    (x, y), *_ = batches = case.batches((5,))
    result = curvature.estimate(case.model(), batches, structure="kron", source=source).blocks
    for module, statistics in asdl_statistics(case.model().eval(), x, y, source, "kron").items():
        expected = torch.kron(statistics.kron.B, statistics.kron.A) / len(x)  # its A is a sum over samples
        assert_same(product(result[f"{module}.weight"]), expected, module, TOLERANCE)
