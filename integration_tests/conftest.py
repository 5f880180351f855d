"""What holds for every integration test: one thread per process, since the ranks share the cores, and patience."""

import os

import pytest
import torch

from flatparam_comm.testing import be_patient

torch.set_num_threads(1)
be_patient()
# Torch's flight recorder keeps the last 2,000 collectives of a process: until it has them, memory grows. Processes that
# tests start have what is here.
os.environ.setdefault("TORCH_FR_BUFFER_SIZE", "16")


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    """Whatever ran before in this process: the bits of some sums depend on the number of threads."""
    torch.set_num_threads(1)
