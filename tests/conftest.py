"""What every test starts from."""

import pytest
import torch


@pytest.fixture(autouse=True)
def same_draws_in_every_order():
    torch.manual_seed(0)
