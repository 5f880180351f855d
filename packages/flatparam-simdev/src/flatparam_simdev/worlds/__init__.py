"""Worlds of ranks for tests, each a process that is forked from a clean server: over gloo, or with a simulated device.

They are collectives of `flatparam-comm`: `pip install flatparam-simdev[worlds]`.
"""

import importlib.util

if importlib.util.find_spec("flatparam_comm") is None:
    raise ModuleNotFoundError(
        "flatparam_simdev.worlds: expected flatparam-comm, which is not installed: "
        "pip install flatparam-simdev[worlds]",
        name="flatparam_comm",
    )

from flatparam_simdev.worlds.process_world import World, run_on_device, run_processes

__all__ = ["World", "run_on_device", "run_processes"]
