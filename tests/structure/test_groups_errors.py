"""What find_groups says when it cannot help, and that it leaves a model as it was."""

import pytest
import torch
from torch import Tensor, nn

from shaver import zoo
from shaver.structure import find_groups


def lenet() -> tuple[nn.Module, Tensor]:
    return zoo.build("lenet", seed=0), torch.randn(2, 1, 28, 28)


def test_a_model_without_hidden_layers_has_no_groups() -> None:
    with pytest.raises(ValueError, match=r"FCN has no units that could be removed\. layers\.0: it makes the model's"):
        find_groups(zoo.build("fcn", hidden=()), torch.randn(2, 784))


def test_a_model_without_layers_says_which_it_would_need() -> None:
    with pytest.raises(ValueError, match="Flatten calls no layer whose channels could be removed"):
        find_groups(nn.Flatten(), torch.randn(2, 3, 4))


def test_an_example_that_does_not_run_is_named_with_the_models_own_error() -> None:
    model, _ = lenet()
    with pytest.raises(RuntimeError, match=r"does not run through LeNet: expected images.*\(2, 3, 28, 28\)"):
        find_groups(model, torch.randn(2, 3, 28, 28))


def test_outputs_that_are_not_a_tensor_need_a_forward() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))

        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"scores": self.layers(x)}

    with pytest.raises(RuntimeError, match="forward=lambda model, batch"):
        find_groups(Two(), torch.randn(2, 3))
    groups = find_groups(Two(), [torch.randn(2, 3)], forward=lambda model, batch: model(batch[0])["scores"])
    assert groups["layers.0"].units == 4


def test_kinds_choose_among_the_groups() -> None:
    model, x = lenet()
    assert list(find_groups(model, x, kinds=["hidden"])) == ["fc1"]
    with pytest.raises(ValueError, match="did you mean 'heads'"):
        find_groups(model, x, kinds=["head"])
    with pytest.raises(ValueError, match=r"no groups of kinds=\['heads'\]; it has groups of channels, hidden"):
        find_groups(model, x, kinds=["heads"])


def test_the_time_limit_names_the_layer() -> None:
    model, x = lenet()
    with pytest.raises(TimeoutError, match="longer than seconds=0 and stopped in layer 'conv1', forward pass 1"):
        find_groups(model, x, seconds=0)
    assert "forward" not in vars(model.conv1)


def test_the_model_is_left_as_it_was() -> None:
    model = zoo.build("wrn16", depth=10, widen=1, seed=0).train()
    model.norm.eval()
    model.stem.weight.requires_grad_(False)
    model.head.weight.grad = torch.ones_like(model.head.weight)
    before = {name: (tensor.data_ptr(), tensor.clone()) for name, tensor in model.state_dict().items()}
    modes = [module.training for module in model.modules()]
    attributes = [sorted(vars(module)) for module in model.modules()]
    random = torch.get_rng_state()
    find_groups(model, torch.zeros(2, 3, 8, 8))
    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model.modules()] == modes
    assert [sorted(vars(module)) for module in model.modules()] == attributes
    assert all(not module._forward_hooks for module in model.modules())
    assert not model.stem.weight.requires_grad
    assert model.head.bias.requires_grad
    assert torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight))
    assert model.head.bias.grad is None
    for name, tensor in model.state_dict().items():
        assert (tensor.data_ptr(), True) == (before[name][0], torch.equal(tensor, before[name][1])), name
