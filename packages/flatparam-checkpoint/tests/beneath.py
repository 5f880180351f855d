"""Helpers of the state layer's tests: its models and optimizers, settings, counted bytes, and processes that are killed."""

from __future__ import annotations

from importlib import import_module
from typing import Any, Final


def _module_of_state(name: str) -> Any:
    return import_module(f"packages.flatparam-state.tests.{name}")  # no name that an `import` could have


_kills, _models, _optimizers, _setups, _worlds = map(
    _module_of_state, ("kills", "models", "optimizers", "setups", "worlds")
)

AllocatedBytes: Final = _module_of_state("accounting").AllocatedBytes
CASES: Final = _models.CASES
Case: Any = _models.Case
mlp: Final = _models.mlp
OPTIMIZERS: Final = _optimizers.OPTIMIZERS
Keeper: Any = _optimizers.Keeper
Make: Any = _optimizers.Make
Ticker: Any = _optimizers.Ticker
adam: Final = _optimizers.adam
lacking_a_parameter: Final = _optimizers.lacking_a_parameter
lacking_a_step: Final = _optimizers.lacking_a_step
DECAY: Final = _setups.DECAY
MLP: Final = _setups.MLP
Setup: Any = _setups.Setup
assert_equal_state: Final = _setups.assert_equal_state
change: Final = _setups.change
full_state: Final = _setups.full_state
whole: Final = _setups.whole
assert_same_optimizer: Final = _worlds.assert_same_optimizer
made_up_gradients: Final = _worlds.made_up_gradients
named_state: Final = _worlds.named_state
same_on_all: Final = _worlds.same_on_all
shard: Final = _worlds.shard
step: Final = _worlds.step
KillAtCall: Final = _kills.KillAtCall
end_of: Final = _kills.end_of
fork: Final = _kills.fork
