"""The tests of segments have the hook of the process, which `shard_module` does not install."""

import pytest

from flatparam_runtime import notice_optimizers


@pytest.fixture(autouse=True)
def _noticed() -> None:
    notice_optimizers()


@pytest.fixture(params=[1, 2], ids=["single", "threads"])
def ranks(request: pytest.FixtureRequest) -> int:
    """A world of one, and one of two threads."""
    return int(request.param)
