"""The processes in which torch's FSDP1 runs, started once for all files."""

import pytest

from integration_tests.lifted.torch_half import Outcomes, launch


@pytest.fixture(scope="session")
def processes() -> Outcomes:
    """What two processes came to."""
    return launch()
