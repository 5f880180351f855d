"""The worlds in which these tests run, started once for all that pytest has collected."""

import os
from pathlib import Path

import pytest

from integration_tests.state.worlds import TEST_TIMEOUT, Job, Worlds


@pytest.fixture(scope="session")
def worlds(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Worlds:
    """One world of processes for each number of ranks; the workers of one pytest run share them."""
    jobs: dict[int, list[Job]] = {}
    for item in request.session.items:
        if hasattr(getattr(item, "function", None), "jobs"):
            asked = item.callspec.params
            jobs.setdefault(asked["size"], []).extend(item.function.jobs[asked["part"]])
    root = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        root = root.parent
    root = Path(root, "state-worlds")
    root.mkdir(exist_ok=True)
    return Worlds(jobs, root)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """A world runs all its bodies before the first test of it ends."""
    for item in items:
        if "worlds" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(TEST_TIMEOUT))
