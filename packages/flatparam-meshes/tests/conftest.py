"""What every test of this package shares: one thread per process, and patience."""

import pytest
import torch

from flatparam_comm.testing import be_patient

# The ranks share the cores.
torch.set_num_threads(1)
be_patient()


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.set_num_threads(1)  # whatever ran before: the bits of some sums depend on it
    torch.manual_seed(0)
