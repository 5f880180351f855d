"""What every test of this package shares: a path to its engines, one thread per process, and a seed."""

import sys
from pathlib import Path

import pytest
import torch

# Ranks import the cases and the engines by their names.
sys.path.insert(0, str(Path(__file__).parent))
# Ranks share the cores; and the bits of some sums depend on the number of threads.
torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.manual_seed(0)
