"""The probe's weights: large ones are the model's own memory, special ones are perturbed copies."""

import pytest
import torch
from torch import Tensor, nn

import shaver
from shaver.curvature.probe import RuleProbe


def probe_of(model: nn.Module) -> RuleProbe:
    wanted = dict(model.named_parameters())
    return RuleProbe(model, None, (torch.randn(8, 120), torch.zeros(8).long()), wanted, {})


def large(fill: str) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(120, 100), nn.Tanh(), nn.Linear(100, 110))
    weight = model[2].weight
    with torch.no_grad():
        if fill == "zero":
            weight.zero_()
        elif fill == "equal":
            weight.fill_(0.3)
        elif fill == "tiny":
            weight.mul_(1e-5)
        elif fill == "masked":
            weight.mul_(torch.rand(weight.shape) < 0.2)
        elif fill == "identity":
            nn.init.eye_(weight)
    return model


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ordinary_large_weights_are_not_copied(dtype: torch.dtype):
    model = large("random").to(dtype)
    batch = torch.randn(8, 120, dtype=dtype), torch.zeros(8).long()
    probe = RuleProbe(model, None, batch, dict(model.named_parameters()), {})
    for name in ("0.weight", "2.weight"):
        assert probe.weights[name].data_ptr() == model.get_parameter(name).data_ptr()
        assert probe.weights[name] is not model.get_parameter(name)
    assert not torch.equal(probe.weights["0.bias"], model[0].bias)  # small ones are perturbed copies


@pytest.mark.parametrize("fill", ["zero", "equal", "tiny", "masked", "identity"])
def test_special_large_weights_are_perturbed_copies(fill: str):
    model = large(fill)
    before = model[2].weight.detach().clone()
    found = probe_of(model).weights["2.weight"]
    assert (found != before).float().mean() > 0.99
    assert torch.equal(model[2].weight, before)


@pytest.mark.parametrize("fill", ["random", "zero"])
def test_a_wrong_rule_is_found_out_with_large_weights(fill: str):
    """The layer doubles its weight, so the linear rule's gradient is half of the true one."""

    class Doubled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, 2 * self.weight)

    model = large(fill)
    twice = Doubled(120, 100, bias=False)
    twice.weight = model[0].weight
    model[0] = twice
    state = {name: value.clone() for name, value in model.state_dict().items()}
    batch = torch.randn(16, 120), torch.randint(0, 110, (16,))
    found = shaver.curvature.estimate(model, [batch], source="ef")
    assert found.rules["0.weight"] != found.rules["2.weight"] == "linear"
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert all(p.grad is None for p in model.parameters())
    loss = nn.CrossEntropyLoss(reduction="none")(model(batch[0]), batch[1])
    squares = torch.zeros_like(model[0].weight)
    for one in loss:
        squares += torch.autograd.grad(one, model[0].weight, retain_graph=True)[0].square()
    torch.testing.assert_close(found.diagonal()["0.weight"], squares)
