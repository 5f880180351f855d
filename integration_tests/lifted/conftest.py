"""What torch's FSDP1 does, asked once for all the tests of a session."""

import pytest

from integration_tests.lifted.torch_half import Outcomes, halves_of, launch


@pytest.fixture(scope="session")
def processes(request: pytest.FixtureRequest) -> Outcomes:
    """What two processes came to, that ran the halves of all test files that were collected."""
    items = [item for item in request.session.items if isinstance(item, pytest.Function)]
    asks_torch = any(map(_is_of_torch, items))
    halves = halves_of({item.module for item in items})
    return launch([half for half in halves if asks_torch or half.__name__.startswith("ours_")])


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that use processes are marked; those that show what torch does are long: that changes with torch alone."""
    for item in items:
        if "processes" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.processes)
            if _is_of_torch(item):
                item.add_marker(pytest.mark.long)


def _is_of_torch(item: pytest.Item) -> bool:
    return "_torch_" in item.name
