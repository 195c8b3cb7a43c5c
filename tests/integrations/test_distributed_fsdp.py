"""Parameters spread over two ranks by fully_shard: the δ, H and masks of one process, each rank with its own rows."""

import copy
import json
from pathlib import Path

import pytest
import torch

import shaver
from shaver.integrations.distributed import prune_sharded
from shaver.io import load_state, load_tensors
from tests.integrations.fsdp_cases import CASES, run, start, train
from tests.integrations.launching import succeed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("fsdp")
    succeed("fsdp_worker.py", folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_the_ranks_together_are_one_process(results: Path, case: str):
    alone = run(case)
    for rank in (0, 1):
        found = load_tensors(results / f"{case}-{rank}.safetensors")
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            if name.startswith("mask"):
                assert torch.equal(found[name], value), name
                assert not value.all()
            else:
                close = 1e-5 * float(value.abs().max())
                torch.testing.assert_close(found[name], value, rtol=1e-5, atol=close, msg=name)


def test_each_rank_holds_its_own_rows_alone(results: Path):
    first, second = (json.loads((results / f"notes-{rank}.json").read_text()) for rank in (0, 1))
    assert first["sharded"]
    assert (first["rows"]["again.weight"], second["rows"]["again.weight"]) == ([4, 7], [3, 7])
    assert (first["rows"]["out.bias"], second["rows"]["out.bias"]) == ([2], [1])


@pytest.mark.parametrize("case", ["sgd", "unit"])
def test_one_process_goes_on_with_what_two_have_saved(results: Path, case: str):
    state = load_state(results / f"half-{case}.safetensors")
    model, spam, optimizer = start(case, 1)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    spam.load_state_dict(state["spam"])
    train(model, spam, optimizer, 0, 1, 1)
    expected = load_tensors(results / f"{case}-0.safetensors")
    for name, value in model.named_parameters():
        torch.testing.assert_close(value.detach(), expected[f"theta.{name}"], rtol=1e-5, atol=1e-8, msg=name)


def test_what_needs_more_than_a_rank_s_rows_is_refused(results: Path):
    notes = json.loads((results / "notes-0.json").read_text())
    assert "a named prior" in notes["own"]
    assert "lambda" in notes["own"]
    assert "online=False" in notes["kron"]


def test_broken_samples_of_one_rank_stop_every_rank(results: Path):
    first, second = (json.loads((results / f"notes-{rank}.json").read_text()) for rank in (0, 1))
    assert "is not finite" in first["broken"]
    assert "is not finite" in second["broken"]


@pytest.mark.parametrize("sparsity", [0.0, 0.3, 0.62, 0.95])
def test_the_threshold_is_the_one_that_sorting_finds(sparsity: float):
    """Ties included: a third of the weights are zero, and equal scores fall in the order of their position."""
    model, spam, optimizer = start("sgd", 1)
    train(model, spam, optimizer, 0, 1, 1)
    with torch.no_grad():
        for p in model.parameters():
            p[::3] = 0.0
    expected = shaver.prune(
        copy.deepcopy(model), shaver.score(model, "opd", posterior=spam.posterior), sparsity=sparsity
    ).masks
    found = prune_sharded(model, spam, sparsity)
    assert found.keys() == expected.keys()
    for name, mask in found.items():
        assert torch.equal(mask, expected[name]), name
        assert not model.get_parameter(name)[~mask].any()


def test_a_bad_sparsity_is_named():
    model, spam, optimizer = start("sgd", 1)
    train(model, spam, optimizer, 0, 1, 1)
    with pytest.raises(ValueError, match=r"60 % is 0\.6"):
        prune_sharded(model, spam, 60)
