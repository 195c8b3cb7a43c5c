"""Whole units of a causal model's blocks: which are removed, what the rest does, and the smaller model."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shaver.integrations.block_units import BlockUnits, Widths, find_widths
from shaver.integrations.causal_blocks import find_blocks
from shaver.integrations.oneshot import OneShot, prune_blocks
from shaver.structure.groups import Group, Groups, Slice
from tests.integrations.causal_models import FAMILIES, build, windows

RIDGE = 0.05


class Reading(nn.Module):
    """A block in which ``down`` reads six units of two inputs each that ``up`` makes."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(5, 12), nn.Linear(12, 7, bias=False)


def problem(seed: int, stay: int, **settings: Any) -> tuple[Reading, BlockUnits, Tensor, Tensor]:
    torch.manual_seed(seed)
    block = Reading()
    index = torch.randperm(12).reshape(6, 2)
    pieces = (Slice("up.weight", 0, index, "makes"), Slice("up.bias", 0, index, "makes"))
    group = Group("mlp", "hidden", 6, (*pieces, Slice("down.weight", 1, index, "reads")))
    x = torch.randn(200, 12, dtype=torch.float64) @ torch.randn(12, 12, dtype=torch.float64)
    units = BlockUnits(
        Widths(Groups({"mlp": group}), {"mlp": stay}), **({"criterion": "opd", "repair": True} | settings)
    )
    return block, units, index, x.T @ x / 200


def fitted(weight: Tensor, second: Tensor, columns: Tensor) -> tuple[Tensor, float]:
    """Least squares for the kept columns, drawn towards the weights as they were, and what is lost."""
    system = second + RIDGE * torch.eye(len(second), dtype=torch.float64)
    found = torch.zeros_like(weight)
    found[:, columns] = torch.linalg.solve(system[columns][:, columns], (weight @ system)[:, columns].T).T
    off = found - weight
    return found, float(((off @ system) * off).sum())


@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_unit_removed_first_is_the_cheapest_of_all_and_the_rest_is_the_least_squares_fit(seed: int) -> None:
    block, units, index, second = problem(seed, 5)
    weight = block.down.weight.detach().double()
    found = units.reduced(block, "down", weight, second, RIDGE)
    fits = [fitted(weight, second, torch.cat([index[:unit], index[unit + 1 :]]).flatten()) for unit in range(6)]
    best = min(range(6), key=lambda unit: fits[unit][1])
    assert (~units.kept["mlp"]).nonzero().flatten().tolist() == [best]
    torch.testing.assert_close(found, fits[best][0], rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("criterion", ["opd", "wanda", "magnitude"])
def test_every_criterion_is_repaired_to_the_least_squares_fit_of_what_it_keeps(criterion: str) -> None:
    block, units, index, second = problem(3, 3, criterion=criterion)
    weight = block.down.weight.detach().double()
    found = units.reduced(block, "down", weight, second, RIDGE)
    kept = index[units.kept["mlp"]].flatten()
    assert len(kept) == 6
    torch.testing.assert_close(found, fitted(weight, second, kept)[0], rtol=1e-6, atol=1e-9)


def test_without_repair_the_kept_weights_stay_and_magnitude_counts_all_that_belongs_to_a_unit() -> None:
    block, units, index, second = problem(4, 2, criterion="magnitude", repair=False)
    weight = block.down.weight.detach()
    with torch.no_grad():
        block.up.bias[index[4]] = 100.0
        block.up.weight[index[1]] = 100.0
    found = units.reduced(block, "down", weight, second.float(), RIDGE)
    assert units.kept["mlp"].nonzero().flatten().tolist() == [1, 4]
    kept = index[[1, 4]].flatten()
    assert torch.equal(found[:, kept], weight[:, kept])
    assert int((found != 0).any(0).sum()) == 4
    left = units.mask(block)
    assert left == {"up.weight": 20, "up.bias": 4, "down.weight": 28}
    assert int((block.up.weight != 0).any(1).sum()) == 4


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("settings", [{}, {"dense_target": True}, {"criterion": "magnitude"}])
def test_every_block_loses_as_many_units_and_the_model_still_generates(name: str, settings: Any) -> None:
    model: Any = build(name, 5)
    dense = deepcopy(model)
    rows = prune_blocks(model, windows(), OneShot(sparsity=0.5, units=True, **settings))
    config = model.config
    if name == "gpt2":  # its configuration ties the number of heads to the hidden size
        assert (config.n_inner, config.n_head) == (64, 4)
    else:
        assert (config.intermediate_size, config.num_attention_heads, config.num_key_value_heads) == (24, 2, 1)
    assert dense.config.to_dict() != config.to_dict()
    for row in rows:
        weight = model.get_parameter(row.name)
        assert (row.weights, row.kept) == (dense.get_parameter(row.name).numel(), weight.numel())
    tokens = windows(2, 6)
    fast = model.generate(tokens, max_new_tokens=4, do_sample=False)
    slow = model.generate(tokens, max_new_tokens=4, do_sample=False, use_cache=False)
    assert fast.tolist() == slow.tolist()


def error(model: Any, dense: Any, tokens: Tensor) -> float:
    with torch.no_grad():
        return float((model(tokens).logits - dense(tokens).logits).square().mean())


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_repair_and_the_dense_target_bring_the_outputs_nearer_to_the_dense_model(name: str) -> None:
    dense, tokens = build(name, 6), windows(40, seed=7)
    errors = []
    for settings in ({"repair": False}, {}, {"dense_target": True}):
        model = deepcopy(dense)
        prune_blocks(model, tokens, OneShot(sparsity=0.5, units=True, **settings))  # type: ignore[arg-type]
        errors.append(error(model, dense, tokens))
    assert errors[0] > errors[1] > errors[2]


def test_bfloat16_stays_bfloat16() -> None:
    model = build("qwen2").bfloat16()
    prune_blocks(model, windows(), OneShot(sparsity=0.5, units=True))
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}
    assert bool(model(windows()).logits.isfinite().all())


def test_shares_are_rounded_to_whole_units_of_at_least_one() -> None:
    chain = find_blocks(build("llama"))
    assert dict(find_widths(chain, 0.3).stay) == {"self_attn": 1, "mlp": 34}
    assert dict(find_widths(chain, 0.1).stay) == {"self_attn": 2, "mlp": 43}
    assert dict(find_widths(chain, 0.999).stay) == {"self_attn": 1, "mlp": 1}
    with pytest.raises(ValueError, match=r"0\.001 is less than half a unit of 2 of self_attn and 48 of mlp"):
        find_widths(chain, 0.001)


def test_blocks_of_different_shapes_are_refused() -> None:
    model: Any = build("llama")
    mlp = model.model.layers[1].mlp
    mlp.gate_proj, mlp.up_proj, mlp.down_proj = nn.Linear(32, 9), nn.Linear(32, 9), nn.Linear(9, 32)
    before = deepcopy(model.state_dict())
    with pytest.raises(ValueError, match=r"model\.layers\.1 has other shapes.*shaver\.compact"):
        prune_blocks(model, windows(), OneShot(sparsity=0.5, units=True))
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_units_have_no_pattern() -> None:
    with pytest.raises(ValueError, match=r"sparsity=0\.25"):
        OneShot(pattern=(2, 4), units=True)
