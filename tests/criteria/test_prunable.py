"""What may be pruned, by default and by rule."""

import pytest
import torch
from torch import nn

from shaver.criteria import prunable
from shaver.criteria.prunable_weights import input_dim


class Everything(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.position = nn.Parameter(torch.zeros(1, 5, 4))
        self.scale = nn.Parameter(torch.ones(1))
        self.convolution = nn.Conv1d(4, 4, 3)
        self.norm = nn.BatchNorm1d(4)
        self.attention = nn.MultiheadAttention(4, 2)
        self.recurrent = nn.GRU(4, 4)
        self.up = nn.ConvTranspose1d(4, 4, 2)
        self.out = nn.Linear(4, 7)


def test_matrices_and_kernels_but_no_bias_norm_embedding_or_table():
    assert list(prunable(Everything())) == [
        "convolution.weight",
        "attention.in_proj_weight",
        "attention.out_proj.weight",
        "recurrent.weight_ih_l0",
        "recurrent.weight_hh_l0",
        "up.weight",
        "out.weight",
    ]


def test_a_matrix_tied_to_an_embedding_is_an_embedding():
    model = Everything()
    model.out.weight = model.embedding.weight
    assert "out.weight" not in prunable(model)
    assert "embedding.weight" not in prunable(model)


def test_first_and_last_by_option_and_anything_by_rule():
    model = Everything()
    assert list(prunable(model, exclude_first=True, exclude_last=True))[::5] == ["attention.in_proj_weight"]
    assert list(prunable(model, lambda name, parameter: "bias" in name and parameter.numel() == 7)) == ["out.bias"]


def test_nothing_to_prune_is_an_error():
    with pytest.raises(ValueError, match="BatchNorm1d has no prunable weight"):
        prunable(nn.BatchNorm1d(3))
    with pytest.raises(ValueError, match="without its first or last"):
        prunable(nn.Linear(2, 2), exclude_last=True)


def test_the_input_dimension():
    model = Everything()
    assert [input_dim(model, name) for name in ("out.weight", "convolution.weight", "up.weight")] == [1, 1, 0]
