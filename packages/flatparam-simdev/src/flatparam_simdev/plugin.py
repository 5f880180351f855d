"""A plugin of pytest that has whole files of tests run on the simulated device, and looks through each for races.

    python -m pytest -p flatparam_simdev.plugin tests

What a test makes is on the device, by torch's default device. A test fails, too, where the checker finds something in
what it has done. Processes that a test starts have no device.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from flatparam_simdev import device
from flatparam_simdev.races import find_races


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Have the tensors of modules of tests on the device, too."""
    with device.DEVICE:
        return (yield)


@pytest.fixture(autouse=True)
def _on_device() -> Iterator[None]:
    device.start_log()
    try:
        with device.DEVICE:
            yield
    finally:
        records = device.stop_log()
    found = [str(finding) for finding in find_races(records)]
    assert found == [], found
