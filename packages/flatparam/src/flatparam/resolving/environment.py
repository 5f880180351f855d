"""The environment variables of the wrapper: those that FSDP1 reads, and our own. The relay has others of its own."""

from __future__ import annotations

import os
from typing import Final, final

import attrs
from typing_extensions import Self

from flatparam_runtime import warn_caller

__all__ = ["TRACE_FOLDER", "Environment"]

TRACE_FOLDER: Final = "FLATPARAM_TRACE"
"""The variable that has the folder of traces."""

_EFFECTS: Final = {
    "FSDP_USE_FAKE_ALL_GATHER": "parameters are not gathered: every result is wrong, and only timings mean something",
    "FSDP_USE_FAKE_REDUCE": "gradients are not reduced: every result is wrong, and only timings mean something",
    "FSDP_SKIP_WRITEBACK_CHECK": "parameters that were given other data after wrapping are not noticed",
}
_told: set[str] = set()


@final
@attrs.frozen
class Environment:
    """The switches of the environment, each on if it is `"1"`; read when a wrapper is made."""

    full_precision_in_eval: bool = False
    skip_writeback_check: bool = False
    fake_all_gather: bool = False
    fake_reduce: bool = False
    nodes_of: int | None = None
    """Ranks per node as torchrun says (`LOCAL_WORLD_SIZE`), or `None`."""
    trace_folder: str | None = None
    """Where each rank leaves a trace of the program (`FLATPARAM_TRACE`), or `None`."""

    @classmethod
    def read(cls) -> Self:
        """Return the switches now; the first time that a switch is found on, a warning says what the switch does."""
        local = os.environ.get("LOCAL_WORLD_SIZE", "")
        return cls(
            _is_on("FSDP_USE_FULL_PREC_IN_EVAL"),
            _is_on("FSDP_SKIP_WRITEBACK_CHECK"),
            _is_on("FSDP_USE_FAKE_ALL_GATHER"),
            _is_on("FSDP_USE_FAKE_REDUCE"),
            int(local) if local.isdigit() else None,
            os.environ.get(TRACE_FOLDER) or None,
        )


def _is_on(name: str) -> bool:
    on = os.environ.get(name) == "1"
    if on and name in _EFFECTS and name not in _told:
        _told.add(name)
        warn_caller(f"{name}=1: {_EFFECTS[name]}")
    return on
