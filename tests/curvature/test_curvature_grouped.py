"""Per-sample gradients of a convolution by kernels of their own: the same numbers as patches give."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from shaver.curvature import estimate
from shaver.curvature.rules import convolution

OPTIONS = [
    {"padding": 1},
    {"stride": 2, "padding": (2, 1)},
    {"dilation": 2},
    {"padding": "same"},
    {"kernel_size": (3, 2)},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("columns", [1, 3])
def test_a_grouped_convolution_builds_the_gradients_that_patches_do(options, columns):
    layer = nn.Conv2d(8, 12, **{"kernel_size": 3, **options})
    x = torch.randn(5, 8, 9, 7)
    grads = torch.randn(columns, *layer(x).shape)
    use = convolution(layer, x, grads)["weight"]
    assert use.kernel is not None
    exact = replace(convolution(layer.double(), x.double(), grads.double())["weight"], kernel=None)
    torch.testing.assert_close(use.square_sum(), exact.square_sum().float(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "options",
    [
        *({"stride": (1, 2), "padding": (2, 1)} if "stride" in options else options for options in OPTIONS),
        {"dilation": (2, 1), "stride": (1, 3)},
        {"padding": 2, "padding_mode": "reflect"},
    ],
    ids=str,
)
@pytest.mark.parametrize(("channels", "columns"), [(1, 1), (1, 4), (6, 1), (6, 9)])
def test_shifted_rows_build_the_gradients_that_patches_do(options, channels, columns):
    layer = nn.Conv2d(channels, 7, **{"kernel_size": 3, **options}).double()
    x = torch.randn(5, channels, 9, 8, dtype=torch.float64)
    grads = torch.randn(columns, *layer(x).shape, dtype=torch.float64)
    use = convolution(layer, x, grads)["weight"]
    assert use.kernel is not None
    for rows in ([use.grads], list(use.grads.split(1))):  # K at once, or one by one beside each other
        found = replace(use, grads=rows[0]).joint_square_sum(rows)
        torch.testing.assert_close(found, replace(use, kernel=None).square_sum(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "layer", [nn.Conv2d(4, 8, 3, stride=2), nn.Conv2d(4, 8, (1, 3)), nn.Conv2d(8, 8, 3, groups=2)], ids=str
)
def test_elsewhere_patches_are_used(layer):
    x = torch.randn(2, layer.in_channels, 6, 6)
    assert convolution(layer, x, torch.randn_like(layer(x)).unsqueeze(0))["weight"].kernel is None


@pytest.mark.parametrize("source", ["ef", "ggn"])
def test_a_network_gets_the_same_curvature_either_way(source):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 9, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.LazyLinear(4)
    )
    x, y = torch.randn(11, 3, 7, 7), torch.randint(0, 4, (11,))
    model(x)
    fast = estimate(model, [(x, y)], source=source).diagonal()
    exact = estimate(model.double(), [(x.double(), y)], source=source).diagonal()
    for name, values in fast.items():
        torch.testing.assert_close(values, exact[name].float(), rtol=1e-3, atol=1e-5)
