"""An estimate leaves no trace: modes, gradients, hooks, flags, buffers and random state, also after an error."""

from typing import Any

import pytest
import torch
from torch import nn

from shaver import curvature
from tests.curvature.cases import BY_NAME

HOOKS = [name for name in vars(nn.Linear(1, 1)) if "hook" in name]


def snapshot(model: nn.Module) -> dict[str, Any]:
    return {
        "modes": [module.training for module in model.modules()],
        "grads": [(id(p.grad), None if p.grad is None else p.grad.clone()) for p in model.parameters()],
        "values": [(id(t), t.detach().clone()) for t in [*model.parameters(), *model.buffers()]],
        "flags": [p.requires_grad for p in model.parameters()],
        "hooks": [{name: list(getattr(m, name) or ()) for name in HOOKS} for m in model.modules()],
        "attributes": [set(vars(m)) for m in model.modules()],
        "rng": torch.get_rng_state(),
        "grad_mode": torch.is_grad_enabled(),
        "dtype": torch.get_default_dtype(),
    }


def assert_unchanged(before: dict[str, Any], after: dict[str, Any]) -> None:
    for key in ("modes", "flags", "hooks", "attributes", "grad_mode", "dtype"):
        assert before[key] == after[key], key
    assert torch.equal(before["rng"], after["rng"]), "random state"
    for key in ("grads", "values"):
        for (old_id, old), (new_id, new) in zip(before[key], after[key], strict=True):
            assert old_id == new_id, f"{key}: another tensor object"
            assert (old is None) == (new is None)
            assert old is None or torch.equal(old, new), key


def prepare(name: str) -> tuple[nn.Module, list[Any]]:
    """A model with mixed modes, a frozen parameter, some gradients and a hook of the user's."""
    case = BY_NAME[name]
    model, batches = case.model(), case.batches()
    children = list(model.modules())
    children[-1].eval()
    children[1].register_forward_hook(lambda module, args, output: None)
    parameters = list(model.parameters())
    parameters[-1].requires_grad_(False)
    parameters[0].grad = torch.full_like(parameters[0], 7.0)
    return model, batches


@pytest.mark.parametrize("source", ["ggn", "ef", "mc"])
@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("name", ["batchnorm-block", "vision-transformer", "attention-batch-first", "registered-twice"])
def test_everything_is_left_as_found(name: str, structure: str, source: str):
    model, batches = prepare(name)
    before = snapshot(model)
    curvature.estimate(model, batches, structure=structure, source=source)
    assert_unchanged(before, snapshot(model))


class Failing(nn.Module):
    """Raises on its second call, from inside the network."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.body, self.calls = body, 0
        self.norm = nn.BatchNorm1d(3, dtype=torch.float64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.norm(self.body(x))
        self.calls += 1
        if self.calls > 1:
            raise KeyError("the network's own mistake")
        return out


@pytest.mark.parametrize("structure", ["diag", "kron"])
@pytest.mark.parametrize("source", ["ggn", "ef", "mc"])
@pytest.mark.parametrize("name", ["vision-transformer", "attention-batch-first"])
def test_also_after_an_exception_in_the_network(name: str, source: str, structure: str):
    body, batches = prepare(name)
    model = Failing(body)
    before = snapshot(model)
    with pytest.raises(KeyError, match="own mistake"):
        curvature.estimate(model, batches, structure=structure, source=source)
    assert_unchanged(before, snapshot(model))


def test_also_after_an_exception_in_the_data():
    model, batches = prepare("batchnorm-block")
    before = snapshot(model)

    def broken():
        yield batches[0]
        raise OSError("disk gone")

    with pytest.raises(OSError, match="disk gone"):
        curvature.estimate(model, broken())
    assert_unchanged(before, snapshot(model))


def test_works_inside_no_grad_and_leaves_it_on():
    model, batches = prepare("batchnorm-block")
    expected = curvature.estimate(model, batches, source="ef").diagonal()
    with torch.no_grad():
        result = curvature.estimate(model, batches, source="ef").diagonal()
        assert not torch.is_grad_enabled()
    for name, values in expected.items():
        assert torch.equal(values, result[name])


def test_the_result_holds_no_graph():
    model, batches = prepare("vision-transformer")
    for structure in ("diag", "kron"):
        for name, block in curvature.estimate(model, batches, structure=structure):
            assert not any(tensor.requires_grad for tensor in block.tensors().values()), name
