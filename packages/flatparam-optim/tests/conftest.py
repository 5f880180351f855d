"""What every test of this package shares: one thread per process, a seed, patience, and the two exposures."""

import pytest
import torch
from hypothesis import settings

from flatparam_comm.testing import be_patient

be_patient()

# The same examples on every run, so that a red test is about the change in hand.
settings.register_profile("flatparam", derandomize=True, deadline=None, database=None, max_examples=60)
settings.load_profile("flatparam")


@pytest.fixture(params=[False, True], ids=["flat", "originals"])
def use_orig_params(request: pytest.FixtureRequest) -> bool:
    """Both exposures."""
    return bool(request.param)


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.set_num_threads(1)  # whatever ran before: the bits of some sums depend on it
    torch.manual_seed(0)
