"""One rank of a sharded model does something that the others do not: an error on every rank, soon, and no dead process."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from flatparam import FullyShardedDataParallel, StateDictType
from flatparam_comm import (
    CommError,
    ProcessGroupCollectives,
    RankError,
    shared_memory,
)
from flatparam_comm.testing import PATIENCE, run_processes
from flatparam_runtime import DivergenceError
from integration_tests.faults.program import DIVERGENCES, Program

pytestmark = pytest.mark.processes


def _train(comm: ProcessGroupCollectives, directory: str, how: str, through: str, use_orig_params: bool) -> None:
    collectives = shared_memory(comm) if through == "shared memory" else comm
    program = Program(FullyShardedDataParallel, StateDictType.FULL_STATE_DICT, collectives, use_orig_params, how)
    for _ in range(3):
        program.step()
    parted = time.monotonic()
    try:
        if comm.rank == 1:
            program.diverge(how)
        for _ in range(6):
            program.step()
        collectives.barrier()
    except (CommError, DivergenceError) as error:
        took = time.monotonic() - parted
        Path(directory, f"rank-{comm.rank}").write_text(f"{type(error).__name__}|{took}|{error}")
        raise


@pytest.mark.parametrize(
    "use_orig_params",
    [pytest.param(False, id="flat"), pytest.param(True, id="originals", marks=pytest.mark.long)],
)
@pytest.mark.parametrize("through", ["gloo", "shared memory"])
@pytest.mark.parametrize("how", DIVERGENCES)
def test_every_rank_is_told(tmp_path: Path, how: str, through: str, use_orig_params: bool) -> None:
    """No rank waits for the timeout or is ended by gloo; each raises an error about what the ranks do differently."""
    with pytest.raises(RankError) as raised:
        run_processes(2, _train, str(tmp_path), how, through, use_orig_params, grace=60)
    assert type(raised.value) is RankError, raised.value
    told = [(tmp_path / f"rank-{rank}").read_text().split("|") for rank in range(2)]
    for kind, took, text in told:
        assert kind in ("MismatchError", "DivergenceError", "PeerError"), text
        # The bound is two seconds on a quiet machine; without the guards it is the process group's timeout.
        assert float(took) < PATIENCE, text
    assert {"MismatchError", "DivergenceError"} & {kind for kind, _, _ in told}, told
