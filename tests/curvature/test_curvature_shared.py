"""On a step that is looked at, a weight's gradient comes from the look: it is autograd's, whatever is done with it."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune
from torch.utils.checkpoint import checkpoint

from shaver.curvature import estimate
from shaver.curvature import shared as module
from tests.curvature.reference import assert_all_same
from tests.curvature.watching import watch


def net(layer: nn.Module, activation: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(layer, activation or nn.ReLU(inplace=True), nn.Flatten(), nn.LazyLinear(4))


#: A layer that shares, and the shape of its input.
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "convolution": (lambda: nn.Conv2d(3, 5, 3), (3, 7, 6)),
    "strided, padded, dilated": (lambda: nn.Conv2d(3, 5, (3, 2), (2, 1), (2, 1), (1, 2)), (3, 7, 6)),
    "groups": (lambda: nn.Conv2d(4, 6, 3, groups=2), (4, 6, 5)),
    "one position": (lambda: nn.Conv2d(4, 6, 3, groups=2, bias=False), (4, 3, 3)),
    "many channels": (lambda: nn.Conv2d(8, 9, 3, padding=1), (8, 5, 5)),
    "1d": (lambda: nn.Conv1d(3, 4, 3), (3, 8)),
    "3d": (lambda: nn.Conv3d(2, 3, 2), (2, 4, 3, 4)),
    "linear": (lambda: nn.Linear(5, 6), (7, 5)),
    "without bias": (lambda: nn.Linear(5, 6, bias=False), (2, 3, 5)),
    "Conv1D": (lambda: pytest.importorskip("transformers.pytorch_utils").Conv1D(6, 5), (7, 5)),
}


def prepared(name: str, dtype: torch.dtype = torch.float64) -> tuple[nn.Module, Tensor, Tensor]:
    build, shape = LAYERS[name]
    model, x = net(build()).to(dtype), torch.randn(6, *shape, dtype=dtype)
    model(x)
    return model.train(), x, torch.randint(4, (6,))


def gradients(model: nn.Module, x: Tensor, y: Tensor) -> dict[str, Tensor]:
    model.zero_grad()
    F.cross_entropy(model(x), y).backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.fixture
def nodes(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What became of the layers that were asked to share: their new output, or None."""
    made: list[Any] = []
    real = module.shared

    def counted(*args: Any) -> Any:
        made.append(real(*args))
        return made[-1]

    monkeypatch.setattr("shaver.curvature.capture.shared", counted)
    return made


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_gradients_and_squares(name: str, dtype: torch.dtype, nodes: list[Any]):
    model, x, y = prepared(name, dtype)
    x.requires_grad_()
    plain = gradients(model, x, y)
    to_inputs, x.grad = x.grad, None
    online = watch(model, data_size=6)
    with online.watch():
        watched = gradients(model, x, y)
    assert nodes[0] is not None, "this case is about something"
    error = 1e-12 if dtype == torch.float64 else 1e-4
    assert_all_same(watched, plain, error)
    torch.testing.assert_close(x.grad, to_inputs)
    found = estimate(model, [(x.detach(), y)], source="ef")
    assert_all_same(online.curvature().diagonal(), found.diagonal(), error)


@pytest.mark.parametrize("frozen", ["0.bias", "0.weight"])
def test_a_frozen_part(frozen: str, nodes: list[Any]):
    model, x, y = prepared("convolution")
    model.get_parameter(frozen).requires_grad_(False)
    plain = gradients(model, x, y)
    with watch(model).watch():
        watched = gradients(model, x, y)
    assert frozen not in watched
    assert_all_same(watched, plain, 1e-12)


def test_gradients_of_gradients():
    """``create_graph`` needs a graph of the gradients, which a look does not leave."""
    model, x, y = prepared("convolution")
    model[1] = nn.Tanh()  # so that there is something to differentiate twice

    def twice() -> tuple[Tensor, ...]:
        weights = list(model.parameters())
        first = torch.autograd.grad(F.cross_entropy(model(x), y), weights, create_graph=True)
        return torch.autograd.grad(sum(g.square().sum() for g in first), weights)

    plain = twice()
    with watch(model).watch():
        watched = twice()
    for old, new in zip(plain, watched, strict=True):
        torch.testing.assert_close(new, old, rtol=1e-10, atol=1e-14)


def test_a_second_backward_pass_adds_as_much_again():
    model, x, y = prepared("linear")
    once = {name: 2 * g for name, g in gradients(model, x, y).items()}
    online = watch(model, data_size=6)
    model.zero_grad()
    loss = F.cross_entropy(model(x), y)
    loss.backward(retain_graph=True)
    loss.backward()
    online.step()
    assert_all_same({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, once, 1e-12)
    assert_all_same(online.curvature().diagonal(), estimate(model, [(x, y)], source="ef").diagonal(), 1e-10)


def test_tensor_hooks_and_autograd_grad_see_the_weight_s_gradient():
    model, x, y = prepared("convolution")
    weight = model[0].weight
    plain = gradients(model, x, y)["0.weight"]
    watch(model)
    (asked,) = torch.autograd.grad(F.cross_entropy(model(x), y), weight)
    torch.testing.assert_close(asked, plain)
    weight.register_hook(lambda g: 3 * g)
    torch.testing.assert_close(gradients(model, x, y)["0.weight"], 3 * plain)


class Skip(nn.Conv2d):
    """Its weight's gradient is a convolution's, its input's is not."""

    def _conv_forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return inputs + super()._conv_forward(inputs, weight, bias)


class Keeping(nn.Conv2d):
    def _conv_forward(self, inputs: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        self.last = super()._conv_forward(inputs, weight, bias)
        return self.last


class Conv1D(nn.Module):
    """Called like the transformers library's, and more than it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight + 2 * self.bias


def replaced(layer: nn.Module) -> nn.Module:
    old = layer.forward
    layer.forward = lambda x: x.mean((1, 2, 3), keepdim=True) + old(x)  # type: ignore[assignment]
    return layer


def with_bias_pruned(layer: nn.Module) -> nn.Module:
    prune.l1_unstructured(layer, "bias", 2)
    return layer


#: Not what their class says, or not their class's: a layer, and the shape of its input.
OTHERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "a subclass that adds its input": (lambda: Skip(3, 3, 3, padding=1), (3, 5, 6)),
    "a forward pass of its own": (lambda: replaced(nn.Conv2d(3, 5, 3)), (3, 7, 6)),
    "another Conv1D": (Conv1D, (7, 5)),
    "a pruned bias": (lambda: with_bias_pruned(nn.Conv2d(3, 5, 3)), (3, 7, 6)),
    "a parametrized bias": (
        lambda: parametrize.register_parametrization(nn.Linear(5, 6), "bias", nn.Softplus()),
        (7, 5),
    ),
}


@pytest.mark.parametrize("name", OTHERS)
def test_only_what_is_known_shares(name: str, nodes: list[Any]):
    build, shape = OTHERS[name]
    channels = shape[0] if len(shape) > 2 else None
    before = nn.Conv2d(channels, channels, 1) if channels else nn.Linear(shape[-1], shape[-1])
    model = nn.Sequential(before, nn.ReLU(inplace=True), build(), nn.Flatten(), nn.LazyLinear(4)).double()
    x, y = torch.randn(6, *shape, dtype=torch.float64), torch.randint(4, (6,))
    model(x)
    plain = gradients(model, x, y)
    with watch(model.train()).watch():
        watched = gradients(model, x, y)
    assert nodes[0] is not None
    assert_all_same(watched, plain, 1e-12)


def test_an_output_that_the_layer_keeps():
    model, x, y = net(Keeping(3, 5, 3), nn.Tanh()).double(), torch.randn(6, 3, 7, 6).double(), torch.randint(4, (6,))
    model(x)

    def both() -> dict[str, Tensor]:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss + (model[0].last - 1).square().mean()).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain = both()
    with watch(model.train()).watch():
        watched = both()
    assert_all_same(watched, plain, 1e-12)


def test_no_gradient_is_not_a_gradient_of_zeros():
    class Cut(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, values: Tensor) -> Tensor:
            return values.clone()

        @staticmethod
        def backward(ctx: Any, grads: Tensor) -> None:  # type: ignore[override]
            return None

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.head = nn.Conv2d(3, 5, 3), nn.Linear(100, 4)

        def forward(self, x: Tensor) -> Tensor:
            return self.head((Cut.apply(self.first(x)) if self.cut else self.first(x)).flatten(1))

    model, x, y = Model().train(), torch.randn(6, 3, 7, 6), torch.randint(4, (6,))
    model.cut = False
    online = watch(model, data_size=6)
    with online.watch():
        assert "first.weight" in gradients(model, x, y)
    model.cut = True
    with online.watch():
        assert set(gradients(model, x, y)) == {"head.weight", "head.bias"}


def test_a_hook_on_the_node_that_changes_the_gradient():
    model, x, y = prepared("convolution")

    def tripled() -> dict[str, Tensor]:
        model.zero_grad()
        kept = []
        handle = model[1].register_forward_pre_hook(lambda m, args: kept.append(args[0].grad_fn))
        loss = F.cross_entropy(model(x), y)
        handle.remove()
        kept[-1].register_prehook(lambda g: (3 * g[0],))
        loss.backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain = tripled()
    with watch(model).watch():
        watched = tripled()
    assert_all_same(watched, plain, 1e-12)


def test_what_a_layer_does_not_keep_may_change_before_the_backward_pass():
    model, x, y = prepared("linear")
    online = watch(model)
    for _ in range(2):
        loss = F.cross_entropy(model(x), y)
        with torch.no_grad():
            model[0].weight.mul_(1.1)  # of no matter for any gradient: the input needs none
        with online.watch():
            loss.backward()
    assert online.looks == 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("part", ["submodule", "whole"])
def test_a_compiled_model(backend: str, part: str):
    model, x, y = prepared("convolution", torch.float32)
    model = nn.Sequential(model[:2], model[2:])
    plain = gradients(model, x, y)
    (model[0] if part == "submodule" else model).compile(backend=backend)
    online = watch(model, data_size=6)
    for _ in range(2):
        with online.watch():
            watched = gradients(model, x, y)
        assert_all_same(watched, plain, 1e-4)
    assert_all_same(online.curvature().diagonal(), estimate(model, [(x, y)], source="ef").diagonal(), 1e-4)


class Checkpointed(nn.Module):
    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.body, x, use_reentrant=False)  # type: ignore[no-any-return]


def kept_outputs(model: nn.Module) -> nn.Module:
    kept = nn.Module()
    model[0].register_forward_hook(lambda m, args, output: setattr(kept, "output", output))
    return kept


def test_a_layer_that_somebody_else_holds_on_to_keeps_its_own_node(nodes: list[Any]):
    """An output that a hook of the user's took aside belongs to the graph too, and so does its gradient."""
    model, x, y = prepared("convolution")
    kept = kept_outputs(model)

    def both() -> dict[str, Tensor]:
        model.zero_grad()
        loss = F.cross_entropy(model(x), y)
        (loss + kept.output.square().mean()).backward()
        return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

    plain = both()
    with watch(model).watch():
        watched = both()
    assert nodes == [None, None]
    assert_all_same(watched, plain, 0.0)


def test_checkpointed_activations(nodes: list[Any]):
    """They are computed again in the backward pass, and must leave what they left before."""
    model, x, y = prepared("convolution")
    wrapped = Checkpointed(model)
    plain = gradients(wrapped, x, y)
    online = watch(wrapped, data_size=6)
    with online.watch():
        watched = gradients(wrapped, x, y)
    assert nodes == [None, None]
    assert_all_same(watched, plain, 0.0)
    assert_all_same(online.curvature().diagonal(), estimate(wrapped, [(x, y)], source="ef").diagonal(), 1e-10)


def test_mixed_precision_and_padding_by_hand_stay_as_they_are(nodes: list[Any]):
    model, x, y = prepared("linear", torch.float32)
    with watch(model).watch(), torch.autocast("cpu", torch.bfloat16):
        loss = F.cross_entropy(model(x).float(), y)
        loss.backward()
    reflected = net(nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect"))
    same = net(nn.Conv2d(3, 4, 3, padding="same"))
    x = torch.randn(6, 3, 5, 5)
    for network in (reflected, same):
        network(x)
        with watch(network.train()).watch():
            gradients(network, x, y)
    assert nodes
    assert all(node is None for node in nodes)
