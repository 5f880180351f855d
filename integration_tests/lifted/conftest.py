"""What torch's FSDP1 does, asked once for all the tests of a session."""

import pytest

from integration_tests.lifted.torch_half import Outcomes, halves_of, launch


@pytest.fixture(scope="session")
def processes(request: pytest.FixtureRequest) -> Outcomes:
    """What two processes came to, that ran the halves of all test files that were collected."""
    modules = {item.module for item in request.session.items if isinstance(item, pytest.Function)}
    return launch(halves_of(modules))


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that ask torch, and no others, need its processes."""
    for item in items:
        if "processes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
