"""What every test starts from."""

import pytest
import torch

from tests.seeds import OFFSET


def pytest_report_header() -> str:
    return f"shaver: SHAVER_TEST_SEED={OFFSET}, {torch.backends.cpu.get_cpu_capability()}, {torch.get_num_threads()} threads"


@pytest.fixture(autouse=True)
def same_draws_in_every_order():
    torch.manual_seed(0)
