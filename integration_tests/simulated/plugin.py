"""`flatparam_simdev.plugin` for tests of flatparam: worlds of threads are on the simulated device, too.

    python -m pytest -p integration_tests.simulated.plugin packages/flatparam-runtime/tests

Each rank has a stream of its own. Tests that start processes are left out, and those that `not_twinned.py` lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch

from flatparam_comm.threads import world as threads
from flatparam_simdev import device
from integration_tests.simulated.not_twinned import why_not_twinned

pytest_plugins = ["flatparam_simdev.plugin"]

_run_rank = threads._run_rank


def _run_rank_on_device(*args: Any) -> None:
    torch.accelerator.synchronize()  # what it is given was made on another stream
    with device.DEVICE, torch.Stream(device=device.DEVICE):
        _run_rank(*args)
        torch.accelerator.synchronize()  # whoever looks at what it returns is on another stream


threads._run_rank = _run_rank_on_device  # type: ignore[assignment]  # it takes whatever that takes


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Leave out what starts processes, which have no device, and what makes no sense there."""
    for item in items:
        reason = why_not_twinned(item.nodeid)
        if item.get_closest_marker("processes"):
            reason = "processes have no simulated device"
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=reason))


MOVING: Final = {
    *("test_offloading.py", "test_between_uses.py", "test_data_given.py", "test_clients_inside.py"),
}
"""Files whose tests take parameters to the host and back by `.data =`, as torch allows it for CUDA."""


@pytest.fixture(autouse=True)
def _moving(request: pytest.FixtureRequest, _on_device: None) -> Iterator[None]:
    with device.behaving("data_changes_device", request.path.name in MOVING):
        yield
