"""The tests of optimizers have the hook of the process, which `shard_module` does not install."""

import pytest

from flatparam_runtime import notice_optimizers


@pytest.fixture(autouse=True)
def _noticed() -> None:
    notice_optimizers()
