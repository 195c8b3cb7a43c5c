"""Random small architectures, drawn by hypothesis, against the dense reference."""

import torch
from hypothesis import HealthCheck, given, note, settings
from hypothesis import strategies as st
from torch import nn

import tests.curvature.networks as net
from shaver import curvature
from tests.curvature.cases import Case, normal
from tests.curvature.reference import assert_all_same

WIDTHS = st.integers(1, 4)


def norm(kind: str, width: int) -> nn.Module:
    return {
        "batch": lambda: nn.BatchNorm2d(width),
        "group": lambda: nn.GroupNorm(1, width),
        "none": nn.Identity,
        "bias": net.Bias,
        "scale": net.Scale,
    }[kind]()


def transpose() -> nn.Module:
    return net.Apply(lambda x: x.transpose(0, 1))


@st.composite
def convolutional(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    channels, side = draw(WIDTHS), draw(st.integers(3, 5))
    layers, width = [], channels
    for _ in range(draw(st.integers(1, 3))):
        groups = draw(st.sampled_from([g for g in range(1, width + 1) if width % g == 0]))
        out = groups * draw(st.integers(1, 2))
        kernel = draw(st.sampled_from([1, 3]))
        mode = draw(st.sampled_from(["zeros", "replicate", "circular"]))
        options = {"groups": groups, "padding": kernel // 2, "padding_mode": mode, "bias": draw(st.booleans())}
        layers += [
            nn.Conv2d(width, out, kernel, stride=draw(st.integers(1, 2)), **options),
            norm(draw(st.sampled_from(["batch", "group", "none", "bias", "scale"])), out),
            draw(st.sampled_from([nn.ReLU(inplace=True), nn.Tanh(), nn.GELU()])),
        ]
        width = out
    return nn.Sequential(*layers, net.pool_pixels(), nn.Linear(width, 3)), (channels, side, side)


@st.composite
def positional(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    width, positions = 2 * draw(st.integers(1, 2)), draw(st.integers(1, 4))
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(1, 2))):
        kind = draw(st.sampled_from(["transformer", "mixer", "linear", "transposed", "multihead"]))
        layers += {
            "transformer": lambda: [net.TransformerBlock(width)],
            "mixer": lambda: [net.MixerBlock(positions, width)],
            "linear": lambda: [nn.Linear(width, width), nn.RMSNorm(width), nn.SiLU()],
            "transposed": lambda: [transpose(), nn.Linear(width, width), nn.Tanh(), transpose()],
            "multihead": lambda: [nn.TransformerEncoderLayer(width, 2, 3, batch_first=True)],
        }[kind]()
    return nn.Sequential(*layers, net.pool_positions(), nn.Linear(width, 3)), (positions, width)


@st.composite
def dense(draw: st.DrawFn) -> tuple[nn.Module, tuple[int, ...]]:
    first = width = draw(WIDTHS)
    layers: list[nn.Module] = []
    for _ in range(draw(st.integers(0, 3))):
        out = draw(WIDTHS)
        layers += [
            nn.Linear(width, out, bias=draw(st.booleans())),
            draw(st.sampled_from([nn.BatchNorm1d(out), nn.LayerNorm(out), nn.Identity(), nn.PReLU()])),
            draw(st.sampled_from([nn.ReLU(inplace=True), nn.Sigmoid()])),
        ]
        width = out
    if layers and draw(st.booleans()):
        layers += [nn.Linear(width, width)] * 2  # one module, called twice
    return nn.Sequential(*layers, nn.Linear(width, 3)), (first,)


@settings(max_examples=25, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.one_of(convolutional(), positional(), dense()), st.integers(1, 4), st.sampled_from(["ggn", "ef"]))
def test_any_small_network(drawn: tuple[nn.Module, tuple[int, ...]], size: int, source: str):
    model, shape = drawn
    note(f"{model}\ninput {shape}, batches of {size} and 2")
    case = Case("drawn", lambda: model, normal(*shape))
    model, batches = case.model(), case.batches((size, 2))
    expected = case.problem(model, batches).diagonal(source)
    result = curvature.estimate(model, batches, source=source).diagonal()
    assert_all_same(result, expected, 1e-9)
    assert all(torch.isfinite(values).all() for values in result.values())
