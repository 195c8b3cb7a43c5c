"""Networks that once gave a wrong H without a word, or crashed: each is right now, or refused in words."""

import copy
import gc
import os
from shutil import which
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

from shaver import SpaM
from shaver.curvature import OnlineCurvature, estimate
from shaver.curvature.blocks import KroneckerBlock
from tests.curvature.networks import Routed
from tests.curvature.reference import Problem, assert_all_same


def data(*sizes: int, shape: tuple[int, ...] = (4,), seed: int = 0) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(n, *shape, generator=generator, dtype=torch.float64), torch.arange(n) % 3) for n in sizes]


def measured(model: nn.Module, batch: tuple[Tensor, Tensor], source: str = "ef") -> dict[str, Tensor]:
    """The diagonal from one training step, for as many data as the batch has."""
    online = OnlineCurvature(model.train(), len(batch[1]), every=1, decay=0.0, source=source)
    model.zero_grad()
    with online.measure():
        F.cross_entropy(model(batch[0]), batch[1]).backward()
    online.close()
    return online.curvature().diagonal()


# A mixture of experts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_rows_that_the_data_choose(seed: int):
    """As many rows as samples may reach an expert without one of each sample being among them."""
    torch.manual_seed(seed)
    model, batches = Routed(3, experts=2).double(), data(3, 4, 2, 5, shape=(2, 3), seed=seed)
    for source in ("ggn", "ef"):
        assert_all_same(estimate(model, batches, source=source).diagonal(), Problem(model, batches).diagonal(source))
    for batch in batches:
        assert_all_same(measured(model, batch), Problem(model, [batch]).diagonal("ef"))


def unevenly_routed() -> tuple[nn.Module, list[tuple[Tensor, Tensor]]]:
    """The probe's three samples send one row each; the next batch sends two rows of one sample and none of another."""
    torch.manual_seed(0)
    model = Routed(2, experts=2).double()
    model.router.weight.data = torch.tensor([[1.0, 0.0], [-1.0, 0.0]], dtype=torch.float64)
    model.router.bias.data.zero_()
    plain = torch.tensor([[[1.0, 0.3], [-1.0, 0.2]]] * 3, dtype=torch.float64) + 0.1 * torch.rand(3, 2, 2)
    uneven = torch.tensor([[[1.0, 0.5], [1.0, -0.7]], [[-1.0, 0.1], [-1.0, 0.9]]], dtype=torch.float64)
    batches = [(plain, torch.arange(3) % 3), (uneven, torch.tensor([0, 2]))]
    return model, batches


def test_an_expert_that_sees_as_many_rows_as_there_are_samples_but_others():
    model, batches = unevenly_routed()
    for source in ("ggn", "ef"):
        assert_all_same(estimate(model, batches, source=source).diagonal(), Problem(model, batches).diagonal(source))
    online = OnlineCurvature(model.train(), 2, every=1, decay=0.0, source="ef")
    for x, y in batches:
        model.zero_grad()
        with online.measure():
            F.cross_entropy(model(x), y).backward()
    assert_all_same(online.curvature().diagonal(), Problem(model, batches[1:]).diagonal("ef"))


@pytest.mark.parametrize("order", [[0, 1], [1, 0]])
def test_rows_that_change_their_rule_between_batches_lose_nothing_of_kronecker_factors(order: list[int]):
    """A batch in which an expert needs the generic rule adds its diagonal to that of the other batches' factors."""
    model, batches = unevenly_routed()
    found = estimate(model, [batches[0], *(batches[n] for n in order)], structure="kron", source="ef")
    factors = estimate(model, [batches[0]], structure="kron", source="ef")
    rest = Problem(model, batches[1:]).diagonal("ef")
    name = "experts.0.weight"
    assert isinstance(factors.blocks[name], KroneckerBlock)
    assert_all_same({name: found.diagonal()[name]}, {name: 2 * factors.diagonal()[name] + rest[name]})
    assert found.rules[name].startswith("diagonal (generic rule in some batches): ")


# A rule that holds for the first samples only --------------------------------------------------------------------


class OwnSlope(nn.Module):
    """A learned slope for negative inputs, as users write it."""

    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor([0.2]))

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x > 0, x, self.slope * x)


@pytest.mark.parametrize("slope", [nn.PReLU, OwnSlope])
@pytest.mark.parametrize("source", ["ggn", "ef"])
def test_a_slope_whose_first_inputs_are_all_negative(slope: type[nn.Module], source: str):
    torch.manual_seed(0)
    model = nn.Sequential(slope(), nn.Linear(4, 3)).double()
    (x, y), *_ = data(8)
    x[:4] = -x[:4].abs()
    found = estimate(model, [(x, y)], source=source)
    assert_all_same(found.diagonal(), Problem(model, [(x, y)]).diagonal(source))


@pytest.mark.parametrize("shape", [(4,), (4, 3), (4, 2, 2)])
@pytest.mark.parametrize("slopes", [1, 4])
def test_a_slope_for_all_channels_or_for_each(shape: tuple[int, ...], slopes: int):
    torch.manual_seed(0)
    model = nn.Sequential(nn.PReLU(slopes), nn.Flatten(), nn.LazyLinear(3)).double()
    batches = data(5, 2, shape=shape)
    model(batches[0][0])
    found = estimate(model, batches)
    assert_all_same(found.diagonal(), Problem(model, batches).diagonal("ggn"))
    assert found.rules["0.weight"] == "prelu"


# Compiled networks -----------------------------------------------------------------------------------------------


def convolutional() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Flatten(), nn.Linear(8, 3))


@pytest.mark.parametrize("whole", [True, False])
def test_a_compiled_network_that_ran_before(whole: bool):
    """Hooks that are added later do not run inside what is compiled already."""
    torch._dynamo.reset()
    model, batches = convolutional().double(), data(5, shape=(1, 4, 4))
    expected = estimate(model, batches, source="ef").diagonal()
    (model if whole else model[0]).compile(backend="aot_eager")
    for x, y in batches:
        F.cross_entropy(model(x), y).backward()
    torch._dynamo.reset()
    assert_all_same(estimate(model, batches, source="ef").diagonal(), expected)
    assert_all_same(measured(model, batches[0]), expected)


def test_a_donated_buffer_is_no_obstacle():
    """The default backend frees what its backward pass needs, so that a second pass through it is an error."""
    torch._dynamo.reset()
    model, batches = convolutional(), [(x.float(), y) for x, y in data(5, shape=(1, 4, 4))]
    expected = estimate(model, batches).diagonal()
    compiled = torch.compile(model, backend="aot_eager")
    with torch._functorch.config.patch(donated_buffer=True):
        found = {n.removeprefix("_orig_mod."): h for n, h in estimate(compiled, batches).diagonal().items()}
        online = [measured(compiled, batches[0], source) for source in ("ef", "mc")]
    assert_all_same(found, expected)
    assert all(torch.isfinite(h).all() for diagonal in online for h in diagonal.values())


@pytest.mark.skipif(
    which("g++") is None and which("clang++") is None, reason="the default backend needs a C++ compiler"
)
@pytest.mark.skipif(
    os.environ.get("ATEN_CPU_CAPABILITY") == "default",
    reason="torch's compiler writes vector code that does not compile without vector instructions",
)
def test_the_default_backend():
    """Estimates, measurements and SpaM see the same network, whether it was compiled, ran before, or was reset."""
    model, (batch,) = convolutional().double(), data(5, shape=(1, 4, 4))
    expected = estimate(model, [batch], source="ef").diagonal()
    compiled, weights = torch.compile(model), copy.deepcopy(model.state_dict())
    F.cross_entropy(compiled(batch[0]), batch[1]).backward()  # runs before, in C++
    for _ in range(2):
        spam = SpaM(compiled, data_size=5, total_steps=10)
        optimizer = torch.optim.SGD(compiled.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            F.cross_entropy(compiled(batch[0]), batch[1]).backward()
            spam.step(optimizer)
        seen = spam.curvature.diagonal()
        spam.close()
        model.load_state_dict(weights)
        assert all(float(h.abs().sum()) > 0 for h in seen.values())
        for found in (estimate(compiled, [batch], source="ef").diagonal(), measured(compiled, batch)):
            assert_all_same({n.removeprefix("_orig_mod."): h for n, h in found.items()}, expected)
        torch._dynamo.reset()


class Silent(nn.Module):
    """Calls its layer's forward function, past the layer's hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head, self.past = nn.Linear(4, 5), nn.Linear(5, 3), False

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.layer.forward(x) if self.past else self.layer(x)))


def test_a_layer_that_is_no_longer_recorded_is_not_zero():
    model, batches = Silent().double(), data(4, 3)
    expected = Problem(model, batches[1:]).diagonal("ef")

    def second() -> Any:
        for batch in batches:
            model.past = batch is batches[1]
            yield batch

    both = Problem(model, batches).diagonal("ggn")
    assert_all_same(estimate(model, second()).diagonal(), both)
    online = OnlineCurvature(model.train(), 3, every=1, decay=0.0, source="ef")
    for x, y in second():
        model.zero_grad()
        with online.measure():
            F.cross_entropy(model(x), y).backward()
    assert_all_same(online.curvature().diagonal(), expected)


# Parametrizations ------------------------------------------------------------------------------------------------


class DropConnect(nn.Module):
    def forward(self, weight: Tensor) -> Tensor:
        return F.dropout(weight, 0.5, self.training)


def parametrized(kind: str) -> nn.Module:
    torch.manual_seed(0)
    layer: nn.Module = nn.Conv1d(2, 4, 3) if kind == "convolution" else nn.Linear(4, 5)
    if kind == "dropped weights":
        parametrize.register_parametrization(layer, "weight", DropConnect())
    else:
        parametrizations.spectral_norm(layer)
    return nn.Sequential(layer, nn.Tanh(), nn.Flatten(), nn.Linear(8 if kind == "convolution" else 5, 3)).double()


@pytest.mark.parametrize("source", ["ef", "mc"])
@pytest.mark.parametrize("kind", ["spectral norm", "dropped weights", "convolution"])
def test_a_measurement_does_not_run_a_parametrization_again(kind: str, source: str):
    """Spectral norm keeps a buffer and dropped weights draw random numbers: both would train differently."""
    trained = []
    for measures in (False, True):
        model, batches = parametrized(kind).train(), data(4, 4, 4, shape=(2, 4) if kind == "convolution" else (4,))
        online = OnlineCurvature(model, 12, every=1, source=source) if measures else None
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        for x, y in batches:
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            if online is not None:
                online.step()
            optimizer.step()
        trained.append(model.state_dict())
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])


@pytest.mark.parametrize("kind", ["spectral norm", "convolution"])
def test_a_transformed_weight_beside_a_raw_bias_and_a_last_batch_of_one(kind: str):
    model, batches = parametrized(kind), data(4, 1, shape=(2, 4) if kind == "convolution" else (4,))
    model.eval()
    found = estimate(model, batches)
    assert_all_same(found.diagonal(), Problem(model, batches).diagonal("ggn"))
    assert found.rules["0.bias"] == ("convolution" if kind == "convolution" else "linear")


# Batches and outputs ---------------------------------------------------------------------------------------------


class Masked(nn.Module):
    """Attention scores with an additive mask that all samples share."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.head = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        scores = x @ self.mix(x).mT + mask
        return self.head((scores.softmax(-1) @ x).mean(1))


@pytest.mark.parametrize("samples", [3, 5])
def test_an_entry_of_the_batchs_length_that_is_not_per_sample(samples: int):
    torch.manual_seed(0)
    model = Masked().double()
    mask = torch.full((samples, samples), -1e3, dtype=torch.float64).triu(1)
    batches = [(x, mask, y) for x, y in data(samples, 2, shape=(samples, 4))]
    reading = {"forward": lambda model, batch: model(batch[0], mask), "targets": lambda batch: batch[-1]}
    for source in ("ggn", "ef"):
        found = estimate(model, batches, source=source, memory_budget=20_000)
        assert_all_same(found.diagonal(), Problem(model, batches, **reading).diagonal(source))


class Altering(nn.Module):
    """Normalises its input in place and needs the generic rule."""

    def __init__(self) -> None:
        super().__init__()
        self.form, self.head = nn.Bilinear(4, 4, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(0.5).add_(0.1)
        return self.head(torch.tanh(self.form(x, x)))


def test_a_network_that_changes_its_input_in_place():
    torch.manual_seed(0)
    model, batches = Altering().double(), data(4, 3)
    kept = [x.clone() for x, _ in batches]
    expected = Problem(model, [(x.clone(), y) for x, y in batches], forward=lambda m, b: m(b[0].clone()))
    found = estimate(model, batches)
    assert_all_same(found.diagonal(), expected.diagonal("ggn"))
    assert all(torch.equal(x, old) for (x, _), old in zip(batches, kept, strict=True))
    x, y = batches[0]
    exact = Problem(model, [(x.clone(), y)], forward=lambda m, b: m(b[0].clone())).diagonal("ef")
    assert_all_same(measured(model, (x, y)), exact)


@pytest.mark.parametrize("outputs", [1, 3])
def test_a_bilinear_layer(outputs: int):
    torch.manual_seed(0)

    class Form(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.form, self.head = nn.Bilinear(4, 4, outputs), nn.Linear(outputs, 3)

        def forward(self, x: Tensor) -> Tensor:
            return self.head(torch.tanh(self.form(x, x.flip(1))))

    model, batches = Form().double(), data(4, 1, 3)
    for source in ("ggn", "ef"):
        assert_all_same(estimate(model, batches, source=source).diagonal(), Problem(model, batches).diagonal(source))
    assert_all_same(measured(model, batches[0]), Problem(model, batches[:1]).diagonal("ef"))


# The generic rule ------------------------------------------------------------------------------------------------


def test_the_generic_rule_takes_all_samples_at_once(monkeypatch: pytest.MonkeyPatch):
    from shaver.curvature.generic import GenericRule

    def one_by_one(*args: Any) -> None:
        raise AssertionError("one sample at a time")

    monkeypatch.setattr(GenericRule, "_single", one_by_one)
    torch.manual_seed(0)
    model = nn.Sequential(nn.ConvTranspose2d(2, 3, 2), nn.Tanh(), nn.Flatten(), nn.Linear(48, 3)).double()
    batches = data(4, shape=(2, 3, 3))
    assert_all_same(estimate(model, batches).diagonal(), Problem(model, batches).diagonal("ggn"))


def test_the_average_keeps_no_graph():
    """Where vmap is used, what it returns depends on the other parameters and would keep their graph."""
    model, (batch,) = Altering().double().train(), data(4)
    online = OnlineCurvature(model, 4, every=1, source="ef")
    sizes = []
    for _ in range(4):
        with online.measure():
            F.cross_entropy(model(batch[0].clone()), batch[1]).backward()
        assert not any(h.requires_grad for h in online.average.values())
        gc.collect()
        sizes.append(sum(isinstance(o, Tensor) for o in gc.get_objects()))
    assert sizes[-1] == sizes[1]
