"""What tests of programs with several ranks need; it ships, so that yours can use it too.

`run_threads` (all ranks in this process, deterministic) and `run_processes` (real processes over gloo) take the same
functions, so a test can be written once and run in both worlds.
"""

from __future__ import annotations

from flatparam_comm.decorators.faults import Delay, Fault, FaultyCollectives, Kill, Raise
from flatparam_comm.processes.world import run_processes
from flatparam_comm.threads.world import run_threads

__all__ = [
    "Delay",
    "Fault",
    "FaultyCollectives",
    "Kill",
    "Raise",
    "run_processes",
    "run_threads",
]
