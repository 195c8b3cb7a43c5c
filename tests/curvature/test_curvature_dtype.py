"""Weights of every precision: float32 agrees with float64, bfloat16 weights accumulate in float32."""

import pytest
import torch
from torch import Tensor

from shaver import curvature
from tests.curvature.cases import BY_NAME

NAMES = ["mlp", "lenet", "transformer-block", "batchnorm-block", "attention-batch-first", "embedding", "scalars"]


def cast(batches: list, dtype: torch.dtype) -> list:
    return [(x.to(dtype) if x.is_floating_point() else x, y) for x, y in batches]


def distance(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Relative distance in norm over all parameters."""
    difference = sum(float((got[n].double() - v).square().sum()) for n, v in expected.items())
    return (difference / sum(float(v.square().sum()) for v in expected.values())) ** 0.5


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("source", ["ggn", "ef"])
@pytest.mark.parametrize("name", NAMES)
def test_float32_agrees_with_float64(name: str, source: str, structure: str):
    case = BY_NAME[name]
    model, batches = case.model(), case.batches()
    expected = curvature.estimate(model, batches, structure=structure, source=source).diagonal()
    single = curvature.estimate(model.float(), cast(batches, torch.float32), structure=structure, source=source)
    assert all(values.dtype == torch.float32 for values in single.diagonal().values())
    assert distance(single.diagonal(), expected) < 1e-4


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("source", ["ggn", "ef", "mc"])
@pytest.mark.parametrize("name", NAMES)
def test_bfloat16_weights_give_float32_curvature(name: str, source: str, structure: str):
    case = BY_NAME[name]
    model, batches = case.model().bfloat16(), cast(case.batches(), torch.bfloat16)
    result = curvature.estimate(model, batches, structure=structure, source=source)
    for _, block in result:
        assert all(tensor.dtype == torch.float32 for tensor in block.tensors().values())
    assert all(p.dtype == torch.bfloat16 for p in model.parameters())
    if source != "mc":  # the same rounded weights and data, computed in float64
        precise = curvature.estimate(model.double(), cast(batches, torch.float64), structure=structure, source=source)
        assert distance(result.diagonal(), precise.diagonal()) < 0.1


def test_bfloat16_does_not_stall_over_many_batches():
    """A sum kept in bfloat16 stops growing after 256 equal terms; this one must not."""
    case = BY_NAME["mlp"]
    model, (batch,) = case.model().bfloat16(), cast(case.batches((1,)), torch.bfloat16)
    one = curvature.estimate(model, [batch], source="ef").diagonal()
    many = curvature.estimate(model, [batch] * 600, source="ef").diagonal()
    for name, values in one.items():
        torch.testing.assert_close(many[name], 600 * values, rtol=1e-3, atol=1e-6)


def test_a_model_may_mix_precisions():
    case = BY_NAME["layernorm"]
    model, batches = case.model().float(), cast(case.batches(), torch.float32)
    model[3] = model[3].double()
    model.insert(3, torch.nn.Identity())
    model[3].register_forward_hook(lambda module, args, output: output.double())
    result = curvature.estimate(model, batches).diagonal()
    assert result["0.weight"].dtype == torch.float32
    assert result["4.weight"].dtype == torch.float64
    assert all(values.isfinite().all() and values.any() for values in result.values())
