"""Every reader against changed files, for a short while; `nox -s fuzz` does so for as long as one likes."""

import os
from pathlib import Path

import pytest

from .checkpoint.small import end_of, fork
from .fuzzing import MAKE, Fuzzer, limit_memory

CASES = int(os.environ.get("FLATPARAM_FUZZED_CHECKPOINTS", "60"))


@pytest.mark.timeout(900)
@pytest.mark.parametrize("name", MAKE)
def test_changed_files(name: str, tmp_path: Path) -> None:
    """A reader returns or raises CheckpointError, whatever a file says, and takes less than a gibibyte of memory."""
    fuzzer = Fuzzer(tmp_path, 1)

    def work() -> None:
        limit_memory()
        taken = sum(fuzzer.case(name, number) for number in range(CASES))
        # What changes a comment, a padding or a name is taken.
        assert taken < CASES * 0.6

    assert end_of(fork(work)) == 0
