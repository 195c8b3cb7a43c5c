"""What every test starts from."""

import pytest
import torch

from tests.seeds import OFFSET


def pytest_report_header() -> str:
    arithmetic = f"{torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} thread(s)"
    return f"shaver: SHAVER_TEST_SEED={OFFSET}, {arithmetic}"


@pytest.fixture(autouse=True)
def same_draws_in_every_order():
    torch.manual_seed(0)
