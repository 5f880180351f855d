"""The engine of this package as the contract of engines takes it, and patience: a busy machine fails no test."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import pytest
import torch

from flatparam_comm import Collectives, shared_memory
from flatparam_comm.testing import PATIENCE, be_patient, run_processes
from flatparam_simdev.worlds import process_world as processes

be_patient()


@pytest.fixture(autouse=True)
def _repeatable() -> None:
    # The bits of some sums depend on the number of threads.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _late_reports_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """If a rank has failed, wait for the others' reports: which rank is to blame must not depend on which is slow."""
    monkeypatch.setattr(processes, "_GRACE_SECONDS", PATIENCE)


@attrs.frozen
class SharedWorld:
    """Ranks of one host that share memory."""

    size: int
    device: str = "cpu"

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Run `fn(collectives, device, *args)` on each rank; returns the results."""
        return run_processes(self.size, run_shared, fn, self.device, *args)


def run_shared(group: Collectives, fn: Callable[..., Any], *args: Any) -> Any:
    """The result of `fn` over the shared memory of the ranks of a process group."""
    return fn(shared_memory(group), *args)


@pytest.fixture(params=[2, 3])
def world(request: pytest.FixtureRequest) -> SharedWorld:
    """Shared memory at two sizes."""
    return SharedWorld(request.param)
