"""What every test of this package shares: a path to its engines, one thread per process, and a seed."""

import sys
from pathlib import Path

import pytest
import torch

from flatparam_certify import certify
from flatparam_comm.testing import PATIENCE

# Ranks import the cases and the engines by their names.
sys.path.insert(0, str(Path(__file__).parent))
# Ranks share the cores; and the bits of some sums depend on the number of threads.
torch.set_num_threads(1)
# Only what hangs reaches a limit.
assert certify.__kwdefaults__ is not None
certify.__kwdefaults__["timeout"] = PATIENCE


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.manual_seed(0)
