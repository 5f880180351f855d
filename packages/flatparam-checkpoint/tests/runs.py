"""Training runs over shards that are saved and loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from flatparam_checkpoint import Checkpointer
from flatparam_comm import Collectives
from flatparam_comm.testing import run_threads

from .beneath import Setup, full_state


def saved(setup: Setup, root: Path, *, steps: int = 3, **options: Any) -> list[Any]:
    """Train and save; returns the full state on each rank when it was saved, and after two steps more."""

    def rank(world: Collectives) -> Any:
        model, optimizer = setup.build(world)
        setup.train(model, optimizer, range(steps))
        with Checkpointer(root, model, optimizer, ranks=world, **options) as checkpointer:
            checkpointer.save(steps, extra={"steps": steps}, rank_extra={"rank": world.rank})
        before = full_state(model, optimizer)
        setup.train(model, optimizer, range(steps, steps + 2))
        return before, full_state(model, optimizer)

    return run_threads(setup.world_size, rank)


def resumed(setup: Setup, root: Path, *, steps: int = 3, **options: Any) -> list[Any]:
    """Load into a different model; returns the full state on each rank, that after two steps more, and `Loaded`."""

    def rank(world: Collectives) -> Any:
        model, optimizer = setup.build(world, seed=8)
        loaded = Checkpointer(root, model, optimizer, ranks=world).load(**options)
        before = full_state(model, optimizer)
        setup.train(model, optimizer, range(steps, steps + 2))
        return before, full_state(model, optimizer), loaded

    return run_threads(setup.world_size, rank)
