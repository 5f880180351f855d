"""One fault on one rank, and what each rank makes of it."""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any, Final

import attrs

from flatparam import FullyShardedDataParallel, StateDictType
from flatparam_comm import (
    ProcessGroupCollectives,
    RankDied,
    RankError,
    WorldTimeout,
    set_relay,
    shared_memory,
)
from flatparam_comm.testing import run_processes
from integration_tests.faults.program import DIVERGENCES, Program, fail_now

__all__ = ["LIBRARIES", "Outcome", "run_trial"]

#: The libraries and transports that are compared.
LIBRARIES: Final = ("gloo", "shared memory", "torch FSDP1")
#: Seconds: the time limit of the process group, and of the whole trial.
LIMIT, _LONGEST = 5.0, 40.0
_STEPS: Final = 6
_WITHOUT: Final = "in a group without rank 0"
_BEFORE: Final = "before the first collective"


@attrs.frozen
class Outcome:
    """What became of a trial: a verdict, the seconds until the last rank knew, and the ranks' words."""

    verdict: str
    seconds: float
    told: tuple[str, ...] = ()


def run_trial(library: str, fault: str, use_orig_params: bool) -> Outcome:
    """Run a trial on two ranks, beside a third one if the group is without rank 0; rank 1 of the group has the fault."""
    with tempfile.TemporaryDirectory() as directory:
        died = waited = ""
        try:
            run_processes(
                2 + fault.endswith(_WITHOUT),
                _rank,
                directory,
                library,
                fault,
                use_orig_params,
                timeout=_LONGEST,
                pg_timeout=LIMIT,
            )
        except RankDied as error:
            died = error.signal or f"exit code {error.exitcode}"
        except RankError:
            pass
        except WorldTimeout as error:
            waited = str(error)
        found = [json.loads(path.read_text()) for path in sorted(Path(directory).glob("rank-*"))]
    survivors = [each for each in found if fault in DIVERGENCES or each["rank"] == 0]
    seconds = max((each["seconds"] for each in survivors), default=0.0)
    told = tuple(f"rank {each['rank']}: {each['kind']}: {each['text']}" for each in survivors)
    expected = "SIGKILL" if "is killed" in fault else "SIGTERM" if fault == "is terminated" else ""
    wanted = 2 if fault in DIVERGENCES else 1
    if died not in ("", expected):
        return Outcome("death", seconds, (f"ended by {died}", *told))
    if waited or seconds >= 0.9 * LIMIT:
        return Outcome("waited", max(seconds, LIMIT), told)
    if len(survivors) < wanted:
        return Outcome("silent", seconds, told)
    is_named = all(each["kind"] in ("PeerError", "MismatchError", "DivergenceError") for each in survivors)
    return Outcome("named" if is_named else "poor words", seconds, told)


def _rank(comm: ProcessGroupCollectives, directory: str, library: str, fault: str, use_orig_params: bool) -> None:
    if library == "torch FSDP1":
        # flatparam tells its peers nothing.
        set_relay(False)
    if fault.endswith(_WITHOUT):
        pair = comm.subgroup([1, 2])
        if pair is None:
            return
        comm = pair
    parted = time.monotonic()
    try:
        if fault.endswith(_BEFORE) and comm.rank == 1:
            fail_now(fault)
        program, meet = _program(comm, library, use_orig_params, fault)
        for _ in range(0 if fault.endswith(_BEFORE) else 3):
            program.step()
        parted = time.monotonic()
        if comm.rank == 1:
            program.diverge(fault) if fault in DIVERGENCES else program.fail(fault)
        for _ in range(_STEPS):
            program.step()
        meet()
    except BaseException as error:
        facts = {"rank": comm.rank, "kind": type(error).__name__, "text": str(error)}
        facts["seconds"] = time.monotonic() - parted
        Path(directory, f"rank-{comm.rank}").write_text(json.dumps(facts))
        if comm.rank == 1 and fault.endswith("and lives"):
            # As a notebook does: nothing follows until the other rank knows, or long enough.
            while not Path(directory, "rank-0").exists() and time.monotonic() - parted < 2 * LIMIT:
                time.sleep(0.05)
        raise


def _program(comm: ProcessGroupCollectives, library: str, use_orig_params: bool, fault: str) -> tuple[Program, Any]:
    if library == "torch FSDP1":
        import torch.distributed as dist
        from torch.distributed.fsdp import FullyShardedDataParallel as Theirs
        from torch.distributed.fsdp import StateDictType as TheirType

        program = Program(Theirs, TheirType.FULL_STATE_DICT, comm.group, use_orig_params, fault)
        return program, lambda: dist.barrier(comm.group)
    collectives = shared_memory(comm) if library == "shared memory" else comm
    program = Program(FullyShardedDataParallel, StateDictType.FULL_STATE_DICT, collectives, use_orig_params, fault)
    return program, collectives.barrier
