"""Sparse execution: the same outputs, only where it was measured to be faster."""

import itertools

import pytest
import torch
from torch import nn

from shaver.pruning import sparse_inference
from shaver.pruning.sparse import SparseLinear, SparsePointwise


def thin(model, sparsity=0.9):
    torch.manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.masked_fill_(torch.rand(parameter.shape) < sparsity, 0)
    return model


class Tokens(nn.Module):
    """Linear layers over tokens, one of them used twice and one without a bias, in and outside torch's own blocks."""

    def __init__(self):
        super().__init__()
        self.twice = nn.Linear(8, 8)
        self.block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.out = nn.Linear(8, 3, bias=False)

    def forward(self, x):
        return {"logits": self.out(self.block(self.twice(self.twice(x)))), "count": 3}


CASES = {
    "perceptron": (lambda: nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5)), (6, 10), 2),
    "tokens": (Tokens, (2, 5, 8), 2),
    "pointwise": (
        lambda: nn.Sequential(
            *(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 6, 1, stride=2), nn.Conv2d(6, 4, 1, bias=False)),
            *(nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 1, padding=1)),
        ),
        (2, 3, 9, 9),
        2,
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_outputs_are_equal_and_the_original_is_untouched(case):
    factory, shape, swapped = CASES[case]
    model = thin(factory()).train()
    x = torch.randn(shape)
    before = {n: t.clone() for n, t in model.state_dict().items()}
    result = sparse_inference(model, x, margin=0.0, repeats=1)
    assert sum(layer.swapped for layer in result.layers) == swapped
    assert sum(isinstance(m, SparseLinear | SparsePointwise) for m in result.model.modules()) == swapped
    assert not any(isinstance(m, SparseLinear | SparsePointwise) for m in model.modules())
    assert all(m.training and not m._forward_pre_hooks for m in model.modules())
    assert all(torch.equal(before[n], t) for n, t in model.state_dict().items())
    y = torch.randn(shape)
    dense, sparse = model.eval()(y), result.model(y)
    if case == "tokens":
        dense, sparse = dense["logits"], sparse["logits"]
    torch.testing.assert_close(sparse, dense, atol=1e-5, rtol=1e-5)


def test_only_sparse_layers_are_tried_and_only_faster_ones_swapped():
    model = nn.Sequential(thin(nn.Linear(10, 20)), nn.ReLU(), nn.Linear(20, 5))
    result = sparse_inference(model, torch.randn(6, 10), margin=float("inf"), repeats=1)
    assert [layer.name for layer in result.layers] == ["0"]
    assert not result.layers[0].swapped
    assert isinstance(result.model[0], nn.Linear)
    assert result.layers[0].sparsity == pytest.approx(float((model[0].weight == 0).float().mean()))
    assert "kept" in str(result)
    assert "whole" in str(result)


def test_unswapped_layers_share_their_tensors():
    model = nn.Sequential(thin(nn.Linear(10, 20)), nn.BatchNorm1d(20))
    result = sparse_inference(model, torch.randn(6, 10), margin=0.0, repeats=1)
    assert result.model[1].weight is model[1].weight
    assert result.model[1].running_mean is model[1].running_mean


def test_named_and_several_inputs():
    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = thin(nn.Linear(10, 10))

        def forward(self, a, b):
            return self.layer(a) + b, self.layer(b)

    model, a, b = Two(), torch.randn(3, 10), torch.randn(3, 10)
    for example in ((a, b), {"a": a, "b": b}):
        fast = sparse_inference(model, example, margin=0.0, repeats=1).model
        torch.testing.assert_close(fast(a, b), model(a, b))


def test_outputs_that_differ_are_an_error():
    calls = itertools.count()

    class Fickle(nn.Module):
        """Not a function of its input."""

        def __init__(self):
            super().__init__()
            self.layer = thin(nn.Linear(10, 10))

        def forward(self, x):
            return self.layer(x) + next(calls)

    with pytest.raises(RuntimeError, match="differ from dense ones"):
        sparse_inference(Fickle(), torch.randn(3, 10), margin=0.0, repeats=1)


class Named(nn.Module):
    """Takes its input by name."""

    def __init__(self):
        super().__init__()
        self.unused = nn.Parameter(torch.ones(1))

    def forward(self, *, x):
        return x


def test_the_result_is_called_like_the_network_and_knows_what_was_measured():
    model = thin(nn.Sequential(nn.Linear(10, 20), nn.ReLU(), nn.Linear(20, 5)))
    x = torch.randn(6, 10)
    fast = sparse_inference(model, x, margin=0.0, repeats=1)
    assert isinstance(fast, nn.Module)
    assert not fast.training
    torch.testing.assert_close(fast(x), model(x))
    assert [layer.name for layer in fast.layers] == ["0", "2"]
    assert "speed-up" in str(fast)
    named = sparse_inference(Named(), {"x": x}, repeats=1)
    torch.testing.assert_close(named(x=x), x)
