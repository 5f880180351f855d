"""Tools for tests of programs with several ranks; they ship, so that your tests can use them too.

`run_threads` (all ranks in this process, deterministic) and `run_processes` (real processes over gloo) take the same
functions, so a test can be written once and run in both worlds. `run_processes` is of `flatparam-simdev`: install
that with your test tools.

A busy machine must not make a test fail, so only a test that hangs reaches a limit: call `be_patient()` once, in a
`conftest.py`, and use `PATIENCE` for any limit of your own. `FLATPARAM_TEST_PATIENCE=4` makes all limits four times as
long.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Final

from flatparam_comm import Collectives, Topology
from flatparam_comm.addons import names_of
from flatparam_comm.decorators.faults import Delay, Fault, FaultyCollectives, Kill, Raise
from flatparam_comm.threads.world import run_threads

if TYPE_CHECKING:
    from flatparam_simdev.worlds import run_processes

__all__ = [
    "BRIEFLY",
    "Delay",
    "Fault",
    "FaultyCollectives",
    "Kill",
    "PATIENCE",
    "Raise",
    "be_patient",
    "longer_and_longer",
    "rectangle",
    "run_processes",
    "run_threads",
]

__getattr__ = names_of({"flatparam_simdev.worlds": "run_processes"}, __name__)

_SCALE: Final = float(os.environ.get("FLATPARAM_TEST_PATIENCE", "1"))

PATIENCE: Final = 600.0 * _SCALE
"""Seconds for a world of ranks or a program: only a test that hangs waits that long."""

BRIEFLY: Final = round(5 * _SCALE)
"""Seconds for a collective that is meant to time out: enough for the ranks that have already arrived."""


def be_patient() -> None:
    """Set the default time limit of `run_threads` and `run_processes` to `PATIENCE`, and of collectives to half of it.

    So a collective that hangs times out before its world does.
    """
    _set_defaults(run_threads, timeout=PATIENCE)
    if importlib.util.find_spec("flatparam_simdev") is not None:
        _set_defaults(__getattr__("run_processes"), timeout=PATIENCE, pg_timeout=PATIENCE / 2)


def longer_and_longer(first: float) -> Iterator[float]:
    """Yield time limits in seconds, each twice as long as the last, for an attempt that must time out under way.

    On a busy machine an attempt takes longer to get under way, so try each limit until one is long enough.
    """
    limit = first
    while limit < PATIENCE / 4:
        yield limit
        limit *= 2


def rectangle(world: Collectives, shards: int) -> Topology:
    """Cut a world into groups of `shards` neighbours that share parameters; across the groups are those of the copies.

    Every rank calls it; `shards` divides the size of the world.
    """
    return Topology.cut(world, [range(start, start + shards) for start in range(0, world.size, shards)])


def _set_defaults(world: Callable[..., Any], **limits: float) -> None:
    defaults = world.__kwdefaults__
    assert defaults is not None
    assert limits.keys() <= defaults.keys(), "the limits are keywords with defaults"
    defaults.update(limits)
