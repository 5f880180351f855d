"""What every test of this package shares: how hypothesis searches, and the two exposures."""

import pytest
import torch
from hypothesis import HealthCheck, settings

# The same examples on every run, so that a red test is about the change in hand. Search further with
# `--hypothesis-profile=flatparam-explore`.
settings.register_profile(
    "flatparam",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=40,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.register_profile(
    "flatparam-explore",
    deadline=None,
    database=None,
    max_examples=2000,
    print_blob=True,
    suppress_health_check=[HealthCheck.too_slow],
)
settings.load_profile("flatparam")


@pytest.fixture(params=[False, True], ids=["flat", "originals"])
def use_orig_params(request: pytest.FixtureRequest) -> bool:
    """Both exposures."""
    return bool(request.param)


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.set_num_threads(1)  # the bits of some sums depend on it
    torch.manual_seed(0)
