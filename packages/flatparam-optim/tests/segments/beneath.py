"""Helpers of the runtime's tests: its models, and how ranks train them."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final


def _of_runtime(name: str) -> Any:
    return import_module(f"packages.flatparam-runtime.tests.{name}")  # no name that an `import` could have


_models, _worlds = _of_runtime("models"), _of_runtime("worlds")

Branches: Final = _models.Branches
Stack: Final = _models.Stack
batch: Final = _models.batch
check_same: Final = _worlds.check_same
full_parameters: Final = _worlds.full_parameters
mean_gradients: Final = _worlds.mean_gradients
run: Final = _worlds.run
seeded: Final = _worlds.seeded
sharded: Final = _worlds.sharded
