"""What torch's FSDP1 does, asked once for all the tests of a session."""

import pytest

from integration_tests.lifted.probes import Saw, ask_torch
from integration_tests.lifted.torch_half import Outcomes, launch


@pytest.fixture(scope="session")
def processes() -> Outcomes:
    """What two processes came to, that ran torch's halves of `torch_half`."""
    return launch()


@pytest.fixture(scope="session")
def torch_saw(request: pytest.FixtureRequest) -> Saw:
    """What each probe, a function `torch_l<row>...` beside the tests that were collected, reports on each rank."""
    modules = {item.module for item in request.session.items if isinstance(item, pytest.Function)}
    probes = {
        probe
        for module in modules
        for name, probe in vars(module).items()
        if name.startswith("torch_l") and probe.__module__ == module.__name__
    }
    return ask_torch(*sorted(probes, key=lambda probe: probe.__name__))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Only the tests that ask torch need its processes."""
    for item in items:
        if "torch_saw" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
