"""The settings that all tests of this package share: the search of hypothesis, and the two exposures."""

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
    """The two exposures, one for each run of the test."""
    return bool(request.param)


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    # The bits of some sums depend on the number of threads.
    torch.set_num_threads(1)
    torch.manual_seed(0)
