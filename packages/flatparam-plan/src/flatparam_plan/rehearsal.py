"""A program run as one rank of a world in which no other exists, and what was seen."""

from __future__ import annotations

import functools
import warnings
from array import array
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NamedTuple, final

import attrs
import torch
from torch import nn

from flatparam_comm import ByteLedger, NoStreams, SingleCollectives, Topology, acting_as
from flatparam_core import ALIGNMENT_NBYTES, CPU_ALIGNMENT_NBYTES
from flatparam_files import without_collector
from flatparam_plan.costs import Costs, Counting, recorded, states_of
from flatparam_plan.hollow.arena import Log
from flatparam_plan.hollow.blank import without_compiler
from flatparam_plan.hollow.hollow_memory import HollowMemory
from flatparam_plan.hollow.kernels import Work, operands_of
from flatparam_plan.recorder import nothing_recorded
from flatparam_plan.training import Call, Setup, Trained, TrainingProgram, train
from flatparam_runtime import Event, Unit, UnitPlan, observe, shard_module, tree_of, units_in


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
    observer = Observer(Counting(ledger, lambda: len(memory.log)), memory, is_ahead)
    topology = recorded(setup.topology(on_call=observer.on_call), ledger)
    try:
        with without_collector():
            return _rehearsed(program, setup, topology, observer, steps)
    finally:
        memory.close()


def _rehearsed(program: TrainingProgram, setup: Setup, topology: Topology, observer: Observer, steps: int) -> Rehearsal:
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
        costs = observer.counting.costs(memory.log.peak, memory.log.in_use)
        stop, notes = len(memory.log), trained.notes
        units = tuple(_facts_of(unit) for unit in units_in(trained.model))
        observer.counting.trained = None
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
        handle.full_nbytes() - sum(slot.span.numel for slot in handle.layout.slots) * handle.buffer.tensor.itemsize
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


# The record of a training program in hollow memory: the tape from which a plan is made


@final
class Entry(NamedTuple):
    """Something that happened, in the order of the host.

    It is a tuple, and no class of attrs, since the plan of a thousand blocks has a hundred thousand of them.

    `kind` is "stage", "kernels", "issued", "waited", or that of a unit's event. `place` is its place in the log of
    memory. For "kernels", `start` and `stop` are places in the list of kernels.
    """

    kind: str
    stage: str
    step: int
    unit: str
    place: int
    start: int = 0
    stop: int = 0
    nbytes: int = 0
    call: Call | None = None


@final
@attrs.frozen
class UnitFacts:
    """The facts of a unit: its name, its bytes, and whether it frees them."""

    name: str
    kind: str
    numel: int
    full_nbytes: int
    """The bytes of the full parameters in their compute dtype, padding included."""
    shard_nbytes: int
    """The bytes of this rank's shard."""
    padding_nbytes: int
    """The bytes of the full parameters that are no parameter."""
    frees_after_forward: bool


@final
@attrs.define(eq=False)
class Rehearsal:
    """The record of a program in hollow memory."""

    setup: Setup
    log: Log
    """Every block of memory."""
    entries: list[Entry]
    works: list[Work]
    kernels: array[int]
    """The number of each kernel's work, in the order in which they run."""
    units: tuple[UnitFacts, ...]
    costs: Costs
    steps: int
    unmeasured: tuple[str, ...]
    """The names of kernels that may take memory of their own that is not in the log."""
    stop: int
    """The place in the log of memory at which the last step has ended."""
    is_laid_out: bool = False
    """Whether some of the blocks were not run, and do what those before them did."""
    notes: tuple[str, ...] = ()
    """How the program is trained, other than the model says."""

    def last_step(self) -> list[Entry]:
        """Return the entries of the last step."""
        before = ("building", "wrapping")
        return [each for each in self.entries if each.step == self.steps - 1 and each.stage not in before]

    def entry_at(self, place: int) -> Entry:
        """Return the last entry up to a place in the log of memory."""
        before = [each for each in self.entries if each.place <= place]
        return before[-1] if before else self.entries[0]


# A watcher of a program in hollow memory: it notes kernels, units and collectives


OUTSIDE = ""
"""The name of no unit."""


@final
@attrs.define(eq=False)
class Observer:
    """A watcher that counts, and also notes kernels, units and collectives."""

    counting: Counting
    memory: HollowMemory
    is_ahead: bool
    """Whether the schedule is that of an accelerator."""
    entries: list[Entry] = attrs.field(factory=list)
    kernels: array[int] = attrs.field(factory=lambda: array("l"))
    _running: list[str] = attrs.field(factory=list)
    """The units whose forward calls are running, the innermost last."""
    _backward_of: str = OUTSIDE
    _now: tuple[str, int] = ("building", 0)
    _moving: bool = False
    _open: int | None = None
    _open_unit: str = OUTSIDE
    _modules: dict[nn.Module, Unit] = attrs.field(factory=dict)
    stack: ExitStack = attrs.field(factory=ExitStack)

    @contextmanager
    def stage(self, name: str, step: int) -> Iterator[None]:
        """Note the stage, and say what the memory that stays after it is for."""
        self._now = (name, step)
        self.memory.log.tag = name
        self._backward_of = OUTSIDE
        self._note("stage")
        with self.counting.stage(name, step):
            yield
            if self.counting.trained is not None:
                self._sort_out(name, self.counting.trained)
        self._close()
        self.memory.log.tag = "other"

    def _sort_out(self, name: str, trained: Trained) -> None:
        """Say what the memory is for that stays after a stage."""
        if name == "backward":
            self.memory.tag((each.grad for each in trained.model.parameters()), "gradients")
        elif name == "optimizer":
            self.memory.tag(states_of(trained.optimizer), "optimizer states")

    def made(self, trained: Trained) -> None:
        """Say what the model's memory is for, and look on when its units are entered and left."""
        self.counting.made(trained)
        self.memory.tag(trained.model.parameters(), "parameters")
        self.memory.tag(trained.model.buffers(), "buffers")
        self._modules = {unit.module: unit for unit in units_in(trained.model)}
        hooks = nn.modules.module
        before = hooks.register_module_forward_pre_hook(self._enters)
        after = hooks.register_module_forward_hook(self._leaves, always_call=True)
        self.stack.callback(before.remove)
        self.stack.callback(after.remove)
        self.stack.enter_context(observe(trained.model, self))

    def _enters(self, module: nn.Module, args: Any) -> None:
        if module in self._modules:
            self._close()
            self._running.append(self._modules[module].name)

    def _leaves(self, module: nn.Module, args: Any, output: Any) -> None:
        if module in self._modules and self._running:
            self._close()
            name = self._running.pop()
            # A unit that stays gathered says nothing when its backward begins.
            for tensor in operands_of([*output.values()] if isinstance(output, Mapping) else output):
                if tensor.grad_fn is not None:
                    tensor.grad_fn.register_prehook(lambda gradients: self._begins_backward(name))

    def _begins_backward(self, name: str) -> None:
        """Note that what is computed from here on is the backward of this unit, unless it is inside a forward call."""
        if self._now[0] == "backward" and self._backward_of != name:
            self._close()
            self._backward_of = name

    @property
    def unit(self) -> str:
        """The unit that computes now."""
        return self._running[-1] if self._running else self._backward_of

    def on_event(self, event: Event) -> None:
        """Note what a unit does."""
        if self.is_ahead:
            # An accelerator's own allocator keeps memory, which counts as free.
            tree_of(next(iter(self._modules.values()))).pool.keeps = False
        if event.kind == "use" and self._now[0] == "backward":
            self._begins_backward(event.unit)
        self._note(event.kind, unit=event.unit, nbytes=event.nbytes)

    def on_call(self, what: str, call: Call) -> None:
        """Note a collective; the work of `LoneRank` itself is none of the program's."""
        self._moving = what == "issued"
        if what != "moved":
            self._note(what, unit=call.label, nbytes=call.nbytes, call=call)

    def on_kernel(self, number: int) -> None:
        """Note a kernel."""
        if self._moving:
            return
        if self._open is not None and self._open_unit != self.unit:
            self._close()
        if self._open is None:
            self._open, self._open_unit = len(self.kernels), self.unit
        self.kernels.append(number)

    def _close(self) -> None:
        """End the run of kernels that one unit computes."""
        if self._open is not None:
            places = (self.counting.place(), self._open, len(self.kernels))
            self.entries.append(Entry("kernels", *self._now, self._open_unit, *places))
            self._open = None

    def _note(self, kind: str, *, unit: str = OUTSIDE, nbytes: int = 0, call: Call | None = None) -> None:
        self._close()
        self.entries.append(Entry(kind, *self._now, unit, self.counting.place(), nbytes=nbytes, call=call))
