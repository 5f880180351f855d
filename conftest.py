"""What holds for every test: bits that depend on values alone, and patience with a busy machine.

`FLATPARAM_TEST_PATIENCE` also scales what the layers' tests wait for; see `flatparam_comm.testing`.
"""

import os

import pytest

# Otherwise the bits of a matrix product depend on where its operands lie (docs/concepts/numbers.md). MKL reads it once,
# when it is first used; processes that tests start inherit it.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Scale `timeout` of pyproject.toml for pytest-timeout, which reads this variable next."""
    patience = os.environ.get("FLATPARAM_TEST_PATIENCE")
    if patience is not None:
        os.environ.setdefault("PYTEST_TIMEOUT", str(float(config.getini("timeout")) * float(patience)))
