"""What the tests of whole matrices share: a seed, and the two exposures."""

import pytest
import torch


@pytest.fixture(params=[False, True], ids=["flat", "originals"])
def use_orig_params(request: pytest.FixtureRequest) -> bool:
    """Both exposures."""
    return bool(request.param)


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    torch.manual_seed(0)
