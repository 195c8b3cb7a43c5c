"""What a batch is: tuples, dicts, and the error for anything else."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from shaver.batches import batch_size_of, forward_of, targets_of


class Sum(nn.Module):
    def forward(self, a, b=0):
        return a + b


X, Y = torch.arange(3.0), torch.arange(3)


def test_the_last_of_a_tuple_is_the_target_and_the_others_are_arguments():
    assert torch.equal(forward_of(Sum(), (X, Y)), X)
    assert torch.equal(forward_of(Sum(), [X, X, Y]), 2 * X)
    assert targets_of((X, X, Y)) is Y
    assert batch_size_of((X, Y)) == 3


def test_a_dict_gives_keyword_arguments_without_the_labels():
    batch = {"a": X, "labels": Y, "b": 1}
    assert torch.equal(forward_of(Sum(), batch), X + 1)
    assert targets_of(batch) is Y
    assert batch_size_of(batch) == 3


@pytest.mark.parametrize("wrap", [lambda out: SimpleNamespace(logits=out), lambda out: {"loss": 0, "logits": out}])
def test_logits_are_unwrapped(wrap):
    class Wrapped(nn.Module):
        def forward(self, x):
            return wrap(x)

    assert forward_of(Wrapped(), (X, Y)) is X


def test_another_layout_is_refused_with_what_would_work():
    with pytest.raises(
        TypeError, match=r"tuple \(inputs, targets\) or a dict with 'labels', not a Tensor; pass forward"
    ):
        forward_of(Sum(), X)
    with pytest.raises(TypeError, match="not a tuple of length 1"):
        targets_of((X,))
    with pytest.raises(KeyError, match="this one has 'a', 'label'"):
        targets_of({"a": X, "label": Y})
    with pytest.raises(TypeError, match="targets are a list"):
        targets_of((X, [0, 1, 2]))
    with pytest.raises(TypeError, match="cannot tell the size of a batch of type str"):
        batch_size_of("abc")


def test_outputs_that_are_no_tensor_are_refused():
    class Pair(nn.Module):
        def forward(self, x):
            return x, x

    with pytest.raises(TypeError, match=r"returned a tuple, not a tensor or something with \.logits"):
        forward_of(Pair(), (X, Y))
