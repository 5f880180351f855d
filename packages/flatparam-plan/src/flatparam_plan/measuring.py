"""The costs of a run of a training program for one rank."""

from __future__ import annotations

import gc
import importlib
import itertools
from typing import Any

from flatparam_comm import ByteLedger, RecordingCollectives, Topology
from flatparam_files import without_collector
from flatparam_plan.allocations import allocations, mark
from flatparam_plan.costs import Costs
from flatparam_plan.counting import Counting
from flatparam_plan.training import Setup, TrainingProgram, train

__all__ = ["measure", "recorded"]


def recorded(topology: Topology, ledger: ByteLedger) -> Topology:
    """The same groups, with a ledger of what passes."""
    replicate = topology.replicate

    def with_ledger(group: Any) -> Any:
        return group if group.size == 1 else RecordingCollectives(group, ledger)

    return Topology(with_ledger(topology.shard), None if replicate is None else with_ledger(replicate))


def measure(program: TrainingProgram, setup: Setup, topology: Topology, *, steps: int = 2) -> Costs:
    """Run `program` for real on the ranks of `topology`, and return what it has cost this rank.

    Memory is what torch's CPU allocator reports of this thread and of the backward passes that it runs; bytes are
    those of the ledger.
    """
    ledger = ByteLedger()
    numbers = itertools.count()

    def place() -> int:
        mark()
        return next(numbers)

    counting = Counting(ledger, place)
    # torch's optimizers import it at first use, and what that import raises and catches keeps tensors alive.
    importlib.import_module("torch._dynamo")
    gc.collect()
    with without_collector():
        with allocations() as found:
            trained = train(program, setup, recorded(topology, ledger), counting, steps=steps)
            last = place()
        costs = counting.costs(found.peak_between, sum(found.sizes[: found.places[last]]))
        del trained
    return costs
