"""A training program run in hollow memory, as one rank of many."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import nn

from flatparam.observing.whole_program import nothing_recorded
from flatparam_comm import ByteLedger, NoStreams, SingleCollectives, Topology, acting_as
from flatparam_core import ALIGNMENT_NBYTES, CPU_ALIGNMENT_NBYTES
from flatparam_files import without_collector
from flatparam_plan.hollow import HollowMemory, without_compiler
from flatparam_plan.measuring import recorded
from flatparam_plan.rehearsal.observer import Observer
from flatparam_plan.rehearsal.rehearsal import Rehearsal, UnitFacts
from flatparam_plan.training import Setup, TrainingProgram, train
from flatparam_runtime import Unit, UnitPlan, shard_module, units_in

__all__ = ["rehearse"]


def rehearse(program: TrainingProgram, setup: Setup, *, steps: int = 2) -> Rehearsal:
    """Run `program` in hollow memory, as one rank of a world in which no other exists.

    Nothing is computed, nothing is sent, and no memory is taken; the wrapper, the runtime and the optimizer are the
    real ones.
    """
    with without_compiler() as stands:
        _find_out_first()
        found = _rehearse(program, setup, steps)
    if stands is not None and stands.was_needed:
        # What the import of the compiler raises and catches keeps tensors alive, so it is to be there before.
        found = _rehearse(program, setup, steps)
    return found


@functools.cache
def _find_out_first() -> None:
    """Train a small module, once in a process, so that what the layers find out once by a kernel is in no rehearsal."""
    with torch.inference_mode(False), torch.enable_grad(), nothing_recorded():
        module = nn.LayerNorm(1, device="cpu")
        shard_module(module, UnitPlan(Topology(SingleCollectives())))
        module(torch.zeros(1, 1, device="cpu")).sum().backward()


def _rehearse(program: TrainingProgram, setup: Setup, steps: int) -> Rehearsal:
    ledger = ByteLedger()
    memory = HollowMemory(lambda number: observer.on_kernel(number))
    is_ahead = setup.device == "accelerator"
    memory.temporaries.are_the_cpus = not is_ahead
    observer = Observer(ledger, lambda: len(memory.log), memory=memory, is_ahead=is_ahead)
    topology = recorded(setup.topology(on_call=observer.on_call), ledger)
    try:
        with without_collector():
            return _rehearsed(program, setup, topology, observer, steps)
    finally:
        memory.close()


def _rehearsed(
    program: TrainingProgram, setup: Setup, topology: Topology, observer: Observer, steps: int
) -> Rehearsal:
    memory = observer.memory
    with (
        memory,
        observer.stack,
        acting_as(NoStreams(runs_ahead=observer.is_ahead)),
        # Hollow memory is the CPU's, where not all is aligned that an accelerator aligns.
        CPU_ALIGNMENT_NBYTES.set_to((ALIGNMENT_NBYTES if observer.is_ahead else CPU_ALIGNMENT_NBYTES).value),
        nothing_recorded(),
        warnings.catch_warnings(),
    ):
        warnings.simplefilter("ignore")
        trained = train(program, setup, topology, observer, steps=steps)
        costs = observer.costs(memory.log.peak, memory.log.in_use)
        stop, notes = len(memory.log), trained.notes
        units = tuple(_facts_of(unit) for unit in units_in(trained.model))
        observer.trained = None
        observer._modules.clear()
    return Rehearsal(
        setup,
        memory.log,
        observer.entries,
        memory.works,
        observer.kernels,
        units,
        costs,
        steps,
        tuple(sorted(memory.temporaries.unmeasured)),
        stop,
        notes=notes,
    )


def _facts_of(unit: Unit) -> UnitFacts:
    numel = sum(slot.span.numel for handle in unit.handles for slot in handle.layout.slots)
    full = sum(handle.full_nbytes() for handle in unit.handles)
    padding = sum(
        handle.full_nbytes()
        - sum(slot.span.numel for slot in handle.layout.slots) * handle.buffer.tensor.itemsize
        for handle in unit.handles
    )
    return UnitFacts(
        unit.name,
        type(unit.module).__name__,
        numel,
        full,
        sum(handle.flat_param.nbytes for handle in unit.handles),
        padding,
        unit.plan.free_after_forward,
    )
