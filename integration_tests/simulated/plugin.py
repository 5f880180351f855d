"""A plugin of pytest that has worlds of threads on the simulated device: whole files of tests have their twins by it.

    python -m pytest -p integration_tests.simulated.plugin packages/flatparam-runtime/tests

What a test makes is on the device, by torch's default device. Each rank has a stream of its own. A test fails, too, where
the checker finds something in what its ranks have done. Tests that start processes are left out, and those that
`not_twinned.py` lists.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

import pytest
import torch

from flatparam_comm.threads import world as threads
from integration_tests.simulated import device
from integration_tests.simulated.not_twinned import why_not_twinned
from integration_tests.simulated.races import find_races

_run_rank = threads._run_rank


def _run_rank_on_device(*args: Any) -> None:
    torch.accelerator.synchronize()  # what it is given was made on another stream
    with device.DEVICE, torch.Stream(device=device.DEVICE):
        _run_rank(*args)
        torch.accelerator.synchronize()  # whoever looks at what it returns is on another stream


threads._run_rank = _run_rank_on_device  # type: ignore[assignment]  # it takes whatever that takes


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Have the tensors of modules of tests on the device, too."""
    with device.DEVICE:
        return (yield)


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
def _on_device(request: pytest.FixtureRequest) -> Iterator[None]:
    device.start_log()
    try:
        with device.DEVICE, device.behaving("data_changes_device", request.path.name in MOVING):
            yield
    finally:
        records = device.stop_log()
    found = [str(finding) for finding in find_races(records)]
    assert found == [], found
