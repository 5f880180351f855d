"""Helpers of the state layer's tests: its models and how they are sharded, counted bytes, and processes that are killed."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final


def _module_of_state(name: str) -> Any:
    return import_module(f"packages.flatparam-state.tests.{name}")  # no name that an `import` could have


_models, _worlds, _kills = (_module_of_state(name) for name in ("models", "worlds", "kills"))

CASES: Final = _models.CASES
Case: Final = _models.Case
mlp: Final = _models.mlp
shard: Final = _worlds.shard
shard_case: Final = _worlds.shard_case
AllocatedBytes: Final = _module_of_state("accounting").AllocatedBytes
KillAtCall: Final = _kills.KillAtCall
end_of: Final = _kills.end_of
fork: Final = _kills.fork
