"""What holds for every test: bits that depend on values alone, ranks that start quickly, patience with a busy machine.

`FLATPARAM_TEST_PATIENCE` also scales what the layers' tests wait for; see `flatparam_comm.testing`.
"""

import os
from multiprocessing import forkserver

import pytest

pytest_plugins = ["covering"]  # tools/covering.py: of the combinations of a test's parameters, most are `long`

# Otherwise the bits of a matrix product depend on where its operands lie (docs/concepts/numbers.md). MKL reads it once,
# when it is first used; processes that tests start inherit it.
os.environ.setdefault("MKL_CBWR", "AVX2,STRICT")

# What nearly every rank imports beside what `run_processes` has its server import, so that no rank has to: our layers,
# as far as they are installed, and what torch imports when the first optimizer is made, which takes a second.
_PRELOADED = (
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.tensor",
    "flatparam_runtime",
    "flatparam_state",
    "flatparam.fully_sharded_data_parallel",
    "flatparam.in_place.applying",
)
_set_forkserver_preload = forkserver.set_forkserver_preload
forkserver.set_forkserver_preload = lambda names: _set_forkserver_preload([*names, *_PRELOADED])


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Scale `timeout` of pyproject.toml for pytest-timeout, which reads this variable next."""
    patience = os.environ.get("FLATPARAM_TEST_PATIENCE")
    if patience is not None:
        os.environ.setdefault("PYTEST_TIMEOUT", str(float(config.getini("timeout")) * float(patience)))
