"""What every test of this package shares: one thread per process, a seed, patience, and the two exposures."""

import pytest
import torch

from flatparam_comm.testing import be_patient
from flatparam_runtime import notice_optimizers

# The ranks share the cores.
torch.set_num_threads(1)
be_patient()
notice_optimizers()


@pytest.fixture(params=[False, True], ids=["flat", "originals"])
def use_orig_params(request: pytest.FixtureRequest) -> bool:
    """Both exposures."""
    return bool(request.param)


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.set_num_threads(1)  # whatever ran before: the bits of some sums depend on it
    torch.manual_seed(0)
