"""Helpers of the state layer's tests: its models and how they are sharded, counted bytes, and processes that are killed."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final


def _module_of_state(name: str) -> Any:
    return import_module(f"packages.flatparam-state.tests.{name}")  # no name that an `import` could have


_models, _worlds, _small = (_module_of_state(name) for name in ("models", "worlds", "checkpoint.small"))

CASES: Final = _models.CASES
Case: Final = _models.Case
mlp: Final = _models.mlp
shard: Final = _worlds.shard
shard_case: Final = _worlds.shard_case
AllocatedBytes: Final = _module_of_state("accounting").AllocatedBytes
KillAtCall: Final = _small.KillAtCall
end_of: Final = _small.end_of
fork: Final = _small.fork
