"""A simulated accelerator for tests on the CPU: races between streams, overlap, process groups, worlds of ranks.

Nothing here makes a device. `flatparam_simdev.device` does when it is imported, for the process that imports it;
`flatparam_simdev.worlds` has processes that do, and others; `flatparam_simdev.plugin` is a plugin of pytest.
"""

from flatparam_simdev.build import CannotBuild, why_not
from flatparam_simdev.contention import contended
from flatparam_simdev.log import HOST, Access, Kind, Record
from flatparam_simdev.races import Finding, Use, find_races
from flatparam_simdev.replay import Communication, Cost, Costs, HostWait, Replay, Step, Task, draw, from_table, replay

__version__ = "0.1.0"

__all__ = [
    "CannotBuild",
    "why_not",
    "HOST",
    "Access",
    "Kind",
    "Record",
    "Finding",
    "Use",
    "find_races",
    "Communication",
    "Cost",
    "Costs",
    "HostWait",
    "Replay",
    "Step",
    "Task",
    "contended",
    "draw",
    "from_table",
    "replay",
]
