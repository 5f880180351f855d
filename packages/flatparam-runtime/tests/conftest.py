"""The settings and fixtures of all tests of this package: hypothesis, the exposures, the worlds and the devices."""

import pytest
import torch
from hypothesis import HealthCheck, settings

from flatparam_comm.testing import be_patient

be_patient()

# The same examples on every run, so that a red test is about the change in hand. Search further with
# `--hypothesis-profile=flatparam-explore`.
settings.register_profile(
    "flatparam",
    derandomize=True,
    deadline=None,
    database=None,
    max_examples=60,
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

_NO_GPU = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device on this machine")


@pytest.fixture(params=[False, True], ids=["flat", "originals"])
def use_orig_params(request: pytest.FixtureRequest) -> bool:
    """Both exposures."""
    return bool(request.param)


@pytest.fixture(params=[1, 2], ids=["single", "threads"])
def ranks(request: pytest.FixtureRequest) -> int:
    """A world of one, and one of two threads."""
    return int(request.param)


@pytest.fixture(params=[True, False], ids=["full-shard", "shard-grad-op"])
def free_after_forward(request: pytest.FixtureRequest) -> bool:
    """Whether a unit's full parameters are freed between forward and backward (and after an unsynced backward)."""
    return bool(request.param)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, _NO_GPU])])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Torch's default device (the CPU), and its twin: one GPU that all ranks share."""
    return torch.get_default_device() if request.param == "cpu" else torch.device(request.param)


@pytest.fixture(autouse=True)
def _quiet_and_repeatable() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)
