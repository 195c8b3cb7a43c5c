"""Every layer with a view is the matrix product that the view says."""

import pytest
import torch
from torch import nn

from shaver.repairing.views import input_rows, matrix_of, output_rows, weight_of

LAYERS = {
    "linear": (nn.Linear(5, 3), (4, 5)),
    "linear, tokens": (nn.Linear(5, 3), (2, 4, 5)),
    "conv1d": (nn.Conv1d(4, 6, 3, stride=2, padding=1), (2, 4, 9)),
    "conv2d": (nn.Conv2d(3, 4, (3, 2), stride=(2, 1), padding=(1, 0), dilation=(1, 2)), (2, 3, 7, 8)),
    "conv2d, grouped": (nn.Conv2d(4, 6, 3, groups=2, padding="same"), (2, 4, 5, 6)),
    "conv2d, depthwise, reflected": (nn.Conv2d(4, 4, 3, groups=4, padding=1, padding_mode="reflect"), (2, 4, 5, 6)),
    "conv2d, one image": (nn.Conv2d(3, 4, 3), (3, 7, 8)),
    "conv3d": (nn.Conv3d(2, 4, (1, 2, 3), stride=(1, 2, 1), groups=2), (2, 2, 3, 5, 6)),
    "transposed 1d": (nn.ConvTranspose1d(4, 6, 3, stride=2, padding=1, output_padding=1), (2, 4, 5)),
    "transposed 2d, grouped": (nn.ConvTranspose2d(4, 6, (3, 2), stride=(2, 3), groups=2, dilation=2), (2, 4, 3, 4)),
    "transposed 3d": (nn.ConvTranspose3d(2, 3, 2, stride=2), (1, 2, 3, 2, 3)),
}


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("thin", [1, 2])
def test_outputs_are_inputs_times_the_matrix(name, thin):
    layer, shape = LAYERS[name]
    layer = layer.double()
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    offset = thin - 1
    rows, matrix = input_rows(layer, x, thin, offset), matrix_of(layer, layer.weight)
    found = rows @ matrix.mT + layer.bias.reshape(len(matrix), 1, -1)
    torch.testing.assert_close(found, output_rows(layer, layer(x), thin, offset))


@pytest.mark.parametrize("name", LAYERS)
def test_the_matrix_turns_back_into_the_weight(name):
    layer, _ = LAYERS[name]
    assert torch.equal(weight_of(layer, matrix_of(layer, layer.weight), layer.weight.shape), layer.weight)


def test_the_transformers_conv1d():
    layer = pytest.importorskip("transformers").pytorch_utils.Conv1D(3, 5)
    x = torch.randn(2, 4, 5)
    found = input_rows(layer, x) @ matrix_of(layer, layer.weight).mT + layer.bias
    torch.testing.assert_close(found, output_rows(layer, layer(x)))
    assert torch.equal(weight_of(layer, matrix_of(layer, layer.weight), layer.weight.shape), layer.weight)
