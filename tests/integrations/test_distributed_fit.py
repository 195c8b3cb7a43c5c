"""shaver.fit under torchrun: the numbers of one process, one writer, and a run that survives the loss of a rank."""

import shutil
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import shaver
from shaver.io import load_tensors
from tests.integrations.fit_cases import CASES, REPEATED, run
from tests.integrations.launching import succeed, torchrun


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("fit")
    succeed("fit_worker.py", "main", folder)
    return folder


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        if value.is_floating_point():
            torch.testing.assert_close(found[name], value, rtol=1e-5, atol=1e-5 * float(value.abs().max()), msg=name)
        else:
            assert torch.equal(found[name], value), name


@pytest.mark.parametrize("case", [*CASES, "sampler"])
def test_every_rank_ends_with_the_same_network(results: Path, case: str):
    first, second = (load_tensors(results / f"{case}-{rank}.safetensors") for rank in (0, 1))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


@pytest.mark.parametrize("case", REPEATED)
def test_the_ranks_together_are_one_process(results: Path, case: str):
    assert_close(load_tensors(results / f"{case}-0.safetensors"), run(case))


def test_one_rank_writes(results: Path):
    files = sorted(path.name for path in (results / "spam").iterdir())
    assert files == [
        "checkpoint-00002.safetensors",
        "checkpoint-00003.safetensors",
        "history.csv",
        "posterior.safetensors",
    ]
    assert len((results / "spam" / "history.csv").read_text().splitlines()) == 4


def test_an_error_on_one_rank_stops_all(results: Path):
    assert (results / "error-1.txt").read_text() == "ValueError('no more')"
    assert "another rank stopped" in (results / "error-0.txt").read_text()


def test_a_run_that_lost_a_rank_ends_and_goes_on_with_any_number_of_ranks(results: Path, tmp_path: Path):
    began = time.perf_counter()
    done = torchrun("fit_worker.py", "dies", tmp_path / "two", timeout=60)
    assert done.returncode != 0
    assert time.perf_counter() - began < 60
    assert [path.name for path in (tmp_path / "two").glob("checkpoint-*")] == ["checkpoint-00001.safetensors"]
    shutil.copytree(tmp_path / "two", tmp_path / "one")
    run("spam", tmp_path / "begun")  # by one process, for two to go on with
    (tmp_path / "begun" / "checkpoint-00003.safetensors").unlink()
    succeed("fit_worker.py", "goes_on", tmp_path / "two", tmp_path / "begun")
    whole = load_tensors(results / "spam-0.safetensors")
    for name, value in load_tensors(tmp_path / "two-1.safetensors").items():
        assert torch.equal(value, whole[name]), name
    assert_close(run("spam", tmp_path / "one"), whole)
    assert_close(load_tensors(tmp_path / "begun-0.safetensors"), whole)


def test_a_wrapped_network_is_refused():
    wrapped = nn.DataParallel(nn.Linear(6, 3))
    with pytest.raises(TypeError, match="pass the plain network instead of DataParallel"):
        shaver.fit(wrapped, [(torch.ones(2, 6), torch.zeros(2, dtype=torch.long))])
