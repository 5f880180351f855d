"""What every test of this package shares: one thread per process, and a seed."""

import pytest
import torch


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.set_num_threads(1)  # whatever ran before: the bits of some sums depend on it
    torch.manual_seed(0)
