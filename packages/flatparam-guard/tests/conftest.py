"""Patience: a busy machine must not make a test fail."""

import pytest
import torch

from flatparam_comm.testing import PATIENCE, be_patient
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
