"""The contract of engines, over shared memory: the tests of the comm layer, in a checkout, with this package's world."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final

import pytest

from flatparam_comm import Collectives, shared_memory
from flatparam_comm.testing import run_processes

pytestmark = pytest.mark.processes


def _of_comm(name: str) -> Any:
    name = f"packages.flatparam-comm.tests.{name}"  # no name that an `import` could have
    pytest.register_assert_rewrite(name)
    return import_module(name)


_UNEVEN: Final = _of_comm("test_uneven")
for _module in (_of_comm("test_contract"), _of_comm("test_contract_refusals")):
    globals().update({name: test for name, test in vars(_module).items() if name.startswith("test_")})


def _uneven(group: Collectives) -> Any:
    return _UNEVEN.gathered_and_reduced(shared_memory(group))


def test_shards_of_different_lengths() -> None:
    """Every rank sees the full parameters, and gets its own elements of the mean gradient."""
    _UNEVEN.check(run_processes(3, _uneven))
