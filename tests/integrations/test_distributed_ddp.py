"""Several processes under DistributedDataParallel learn the δ and prune the weights that one process does."""

from pathlib import Path

import pytest
import torch

from shaver.io import load_tensors
from shaver.spam import SpaM
from tests.integrations.ddp_cases import CASES, run
from tests.integrations.launching import succeed


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("ddp")
    succeed("ddp_worker.py", folder)
    return folder


@pytest.mark.parametrize("case", CASES)
def test_every_rank_has_the_same_weights_precisions_and_masks(results: Path, case: str):
    first, second = (load_tensors(results / f"{case}-{rank}.safetensors") for rank in (0, 1))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("case", [c for c in CASES if c != "mc"])
def test_the_ranks_together_are_one_process(results: Path, case: str):
    found, alone = load_tensors(results / f"{case}-0.safetensors"), run(case)
    assert found.keys() == alone.keys()
    for name, value in alone.items():
        if name.startswith("mask"):
            assert torch.equal(found[name], value), name
        else:
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()), msg=name)


def test_mc_draws_other_labels_on_every_rank(results: Path):
    """The labels are random, so that one process agrees only roughly: in the sum over all weights."""
    found, alone = load_tensors(results / "mc-0.safetensors"), run("mc")
    ratio = sum(float(v.sum()) for n, v in found.items() if n.startswith("h.")) / sum(
        float(v.sum()) for n, v in alone.items() if n.startswith("h.")
    )
    assert 0.5 < ratio < 2
    assert not torch.allclose(found["h.0.weight"], alone["h.0.weight"], rtol=1e-3)


def test_lightning_s_ranks_are_one_process_too(results: Path):
    pytest.importorskip("lightning")
    from tests.integrations.lightning_case import run as run_lightning

    alone = run_lightning(1)
    for rank in (0, 1):
        found = load_tensors(results / f"lightning-{rank}.safetensors")
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()), msg=name)


def test_data_parallel_is_refused():
    with pytest.raises(TypeError, match="DistributedDataParallel"):
        SpaM(torch.nn.DataParallel(torch.nn.Linear(2, 2)), 10)
