"""A unit: a module and the parameters that it shards together."""

from __future__ import annotations

import contextlib
import operator
import weakref
import zlib
from collections.abc import Iterable, Sequence
from typing import Any, Final, final

import attrs
import torch
from torch import nn

from flatparam_comm import Averaging, FlatParamError, FlatParamHandle, Gather, Reducer, Reduction, Residency, Topology
from flatparam_runtime.agreement.fingerprint import Fingerprint
from flatparam_runtime.unit.calls import ForwardCall
from flatparam_runtime.unit.module import TREE, UnitModule, next_number
from flatparam_runtime.unit.observers import Observers
from flatparam_runtime.unit.phases import PHASES, Phase, Summoned
from flatparam_runtime.unit.plan import UnitPlan

_CPU: Final = torch.device("cpu")
_IS_TRAINED: Final = operator.attrgetter("exposure.is_trainable")
_TAKEN_OVER: Final = operator.attrgetter("taken_over")
_TRAINED: Final = operator.attrgetter("trained")


@final
@attrs.define(eq=False)
class Links:
    """The relations of a unit to other units."""

    lenders: list[Unit] = attrs.field(factory=list)
    """The units that hold parameters which this unit's module uses too."""
    borrowers: list[Unit] = attrs.field(factory=list)
    """The units whose modules use parameters that this unit holds."""
    forward_prefetch: Sequence[Unit] | None = None
    """The units to gather when this unit's forward begins; `None` gathers those that the last pass suggests."""
    backward_prefetch: Sequence[Unit] | None = None
    """The units to gather when this unit's backward begins; `None` gathers those that the forward suggests."""


@final
@attrs.define(eq=False)
class Unit:
    """One module's flat parameters and their state on this rank.

    Invariants: all handles have the same residency between two calls; `phase` is FORWARD exactly while
    `calls` holds a call that is not a recomputation.
    """

    name: str
    """The module's name below the root of its tree; `(root)` for the root itself."""
    plan: UnitPlan
    handles: tuple[FlatParamHandle, ...]
    held: UnitModule
    phase: Phase = Phase.IDLE
    reducer: Reducer = attrs.Factory(lambda self: Reducer(self.plan.topology, sums=self.plan.sums), takes_self=True)
    """The reducer, which averages gradients and knows the flat parameters that wait for the next reduction."""
    links: Links = attrs.field(factory=Links)
    observers: Observers = attrs.field(factory=Observers)
    showing: Summoned = attrs.field(factory=Summoned)
    """The state of the full parameters outside of passes: of `summon_full_params`, and of gathers by a caller."""
    gather: Gather | None = None
    """The gather of the full parameters, from its issue until they are freed."""

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.phase.name}, {list(self.handles)!r})"

    def __str__(self) -> str:
        return f"unit {self.name!r}"

    # Queries

    @property
    def module(self) -> nn.Module:
        """The module whose forward pass needs these parameters.

        Raises:
            FlatParamError: if it does not exist any more.
        """
        module = self.held.reference()
        return self.held.get(self.name) if module is None else module

    @property
    def topology(self) -> Topology:
        """The ranks that share its parameters, and those that hold copies."""
        return self.plan.topology

    @property
    def calls(self) -> list[ForwardCall]:
        """The module's running forward calls, the innermost last."""
        return self.held.calls

    @property
    def residency(self) -> Residency:
        """The residency of all handles; SHARDED for a unit without parameters."""
        return self.handles[0].residency if self.handles else Residency.SHARDED

    @property
    def device(self) -> torch.device:
        """The device of the full parameters; the CPU for a unit without parameters."""
        return self.handles[0].forms.device if self.handles else _CPU

    def stamp(self) -> int:
        """Return a number that changes with every in-place change of the unit's parameters."""
        stamp = 0
        for handle in self.handles:
            stamp += handle.stamp()
        return stamp

    @property
    def is_stale(self) -> bool:
        """Whether the shards have changed in place since they were gathered."""
        return self.stamp() != (0 if self.gather is None else self.gather.stamp)

    @property
    def trainable(self) -> tuple[FlatParamHandle, ...]:
        """The flat parameters that contain a parameter which is to get a gradient."""
        return tuple(filter(_IS_TRAINED, self.handles))

    @property
    def is_needed(self) -> bool:
        """Whether a context or a running forward call, of this unit or of a borrower, uses the full parameters."""
        if self.held.calls or self.showing.pins:
            return True
        borrowers = self.links.borrowers
        return bool(borrowers) and any(unit.held.calls for unit in borrowers)

    @property
    def computes_in_full_precision(self) -> bool:
        """Whether a forward call that begins now uses the parameters in their own dtype."""
        return bool(self.showing.pins) or (self.plan.full_precision_in_eval and not self.module.training)

    @property
    def unsharded_nbytes(self) -> int:
        """The bytes of the full parameters."""
        return sum(handle.forms.current.buffer.nbytes for handle in self.handles)

    def move(self, phase: Phase) -> None:
        """Take a step of the phase table."""
        # The shortcut for every legal step.
        self.phase = phase if phase in PHASES.steps[self.phase] else PHASES.move(self.phase, phase, who=self)

    # Full parameters

    def begin_unshard(self, *, full_precision: bool = False, copied: bool = False, alone: bool = False) -> None:
        """Issue the gather of the full parameters, unless they are in memory or their gather is in flight.

        Args:
            full_precision: gather them in their own dtype, whatever the compute dtype.
            copied: gather them to memory of their own, even if nothing is sharded.
            alone: do not gather those of lenders, too: somebody else tells when.
        """
        for lender in () if alone else self.links.lenders:
            lender.begin_unshard(full_precision=full_precision, copied=copied)
        if not self.handles or self.handles[0].residency is not Residency.SHARDED:
            return
        if self.showing.away:
            self.showing.check_here(self.name, self.topology.rank)
        nbytes = sum([handle.forms.nbytes[full_precision] for handle in self.handles])
        self.observers.tell(self, "unshard", nbytes)
        self.gather = Gather.issue(
            self.handles,
            self.plan.topology.shard,
            label=self.name,
            full_precision=full_precision,
            copied=copied,
            take_over=self.plan.notices_replacement,
            hook=self.reducer.hooks.all_gather,
            own=None if full_precision else self.plan.gathers,
        )
        if any(map(_TAKEN_OVER, self.handles)):
            self._tell_taken_over()

    def _tell_taken_over(self) -> None:
        for handle in self.handles:
            if handle.taken_over:
                self.observers.tell(self, "take over", handle.flat_param.nbytes)

    def take_over(self, *, frees: bool = False) -> None:
        """Have the shards hold what the user gave parameters since the last gather, for who reads them between passes.

        Args:
            frees: free the full parameters first; otherwise only if somebody has given a parameter other data.

        Raises:
            FlatParamError: if the data do not fit; nothing has changed.
        """
        if frees or (self.residency is not Residency.SHARDED and not self.is_needed and self.was_given_data):
            self.reshard()
        if self.is_needed or not self.plan.notices_replacement:
            return
        for handle in self.handles:
            handle.take_over()
        self._tell_taken_over()

    def finish_unshard(self) -> None:
        """Wait for the gather and show the full parameters, unless they are shown already."""
        for lender in self.links.lenders:
            lender.finish_unshard()
        if self.gather is None or self.handles[0].residency is not Residency.UNSHARDING:
            return
        trained = [*map(_TRAINED, self.handles)]
        if self.observers.instruments:
            self.observers.waits(self, "all_gather")
        self.gather.finish()
        if [*map(_TRAINED, self.handles)] != trained:
            self._note_training(trained)
        if self.observers.instruments:
            self.observers.tell(self, "use", self.unsharded_nbytes)

    @property
    def was_given_data(self) -> bool:
        """Whether somebody has given a parameter other data (`.data =`) since the unit was gathered."""
        return self.plan.notices_replacement and any(handle.exposure.was_given_data for handle in self.handles)

    def follow_training(self) -> None:
        """Have full parameters that stayed since the last pass require gradients as the user's parameters do now."""
        if self.residency is Residency.UNSHARDED:
            trained = [*map(_TRAINED, self.handles)]
            for handle in self.handles:
                handle.follow_training()
            if [*map(_TRAINED, self.handles)] != trained:
                self._note_training(trained)

    def _note_training(self, before: Sequence[list[bool]]) -> None:
        """Have the ranks compare, at the end of the pass, which parameters are trained, if not `before`."""
        for handle, trained in zip(self.handles, before, strict=True):
            if handle.trained == trained:
                continue
            self.observers.tell(self, "train", zlib.crc32(bytes(handle.trained)))
            if any(trained) and not any(handle.trained) and self.plan.topology.data_parallel_size > 1:
                # Another rank may still train it: it is reduced once more, and then all ranks detect the divergence.
                self.reducer.unsynced.add(handle)

    def unshard(self, *, full_precision: bool = False, copied: bool = False) -> None:
        """Have the module show its full parameters; see `begin_unshard`."""
        self.begin_unshard(full_precision=full_precision, copied=copied)
        self.finish_unshard()

    def shed(self, *, full_precision: bool, stale: bool = False) -> None:
        """Free full parameters whose dtype is not the requested one, unless something uses them.

        Args:
            stale: free those that have become stale, too.
        """
        if self.gather is None:
            return
        fit = all([each.computes_in(full_precision=full_precision) for each in self.handles])
        own = None if full_precision else self.plan.gathers
        fit = fit and self.gather.is_rounded is (own is not None and own.rounds)
        if (not fit or (stale and self.is_stale)) and not self.is_needed:
            self.reshard()

    def hold(self) -> None:
        """Issue the gather for a caller outside of passes, so that the next pass does not gather again.

        Full parameters that have become stale, or have a different dtype than a forward call would give them, go first.
        """
        full_precision = self.computes_in_full_precision
        self.shed(full_precision=full_precision, stale=True)
        self.begin_unshard(full_precision=full_precision)
        self.showing.hold(bool(self.handles))

    def reshard(self, *, is_computed: bool = False) -> None:
        """Free the full parameters, if there are any, even if their gather is still in flight.

        While a context keeps the full parameters, this does nothing.

        Args:
            is_computed: no graph has any of them for a backward pass: somebody else who has a view keeps the memory.
        """
        if self.gather is None or self.showing.pins:
            return
        # What was prefetched in vain has no values yet, and is for a graph of which a backward pass is to come.
        if is_computed and self.residency is Residency.UNSHARDED:
            for handle in self.handles:
                handle.forms.current.leave_to_holders()
        if self.showing.are_held:
            # Parameters that the caller has put in the places of full ones, to compute with, go too.
            for handle in self.handles if self.residency is Residency.UNSHARDED else ():
                handle.exposure.put_back()
            self.showing.hold(False)
        self.gather.drop()
        self.gather = None
        self.list_flat_parameters(True)
        if self.observers.instruments:
            self.observers.tell(self, "reshard", self.unsharded_nbytes)

    # Parameters that are listed, and lent

    def begin_call(self, call: ForwardCall) -> None:
        """Note a forward call that begins: what it reads is listed under the original names from now on."""
        self.held.begin_call(call)
        for each in (self, *self.links.lenders):
            each.list_flat_parameters(False)

    def list_flat_parameters(self, listed: bool) -> None:
        """Have `parameters()` list the flat parameters, or not: inside a forward call, which has the full ones."""
        # No hook is called when Ctrl-C interrupts a module in place, and the flat parameter would not be listed again.
        if self.plan.use_orig_params or self.held.by_hooks or self.showing.pins:
            return
        for handle in self.handles:
            if handle.exposure.hides_shard is listed:
                handle.exposure.list_flat_parameter(listed)

    def borrow(self, lender: Unit, fqn: str) -> None:
        """Have `lender` be gathered and used together with this unit, until `give_back`.

        Raises:
            FlatParamError: if `lender` borrows from this unit; the message names `fqn`, the parameter that is read.
        """
        if self in lender._all_lenders():
            raise FlatParamError(
                f"rank {self.topology.rank}: the forward pass of unit {self.name!r} reads parameter {fqn!r} of unit "
                f"{lender.name!r}, which itself uses parameters of {self.name!r}; make one unit of a module around both"
            )
        self.links.lenders.append(lender)
        lender.links.borrowers.append(self)

    def give_back(self, lender: Unit) -> None:
        """End what `borrow` began."""
        self.links.lenders.remove(lender)
        lender.links.borrowers.remove(self)

    def _all_lenders(self) -> set[Unit]:
        found: set[Unit] = {self}
        for lender in self.links.lenders:
            found |= lender._all_lenders()
        return found

    # Gradients

    def begin_reduce(self, handles: Sequence[FlatParamHandle], averaging: Averaging) -> Reduction:
        """Issue the reduction of the gradients of `handles`, which were collected with these factors, to the shards."""
        self.move(Phase.REDUCING)
        self.reducer.unsynced.clear()
        nbytes = 0
        for handle in handles:
            nbytes += handle.gradients.buffer.nbytes
        self.observers.tell(self, "reduce", nbytes)
        factor, fingerprint = self.reducer.divide_factor, self.observers.fingerprint
        if factor is not None and fingerprint is not None:
            fingerprint.note_step(f"set_gradient_divide_factor({factor!r}) of unit {self.name!r}")
        return self.reducer.issue(handles, label=self.name, averaging=averaging)

    # Changes by a caller

    def join(self, name: str, number: int, fingerprint: Fingerprint) -> None:
        """Join a tree, as its unit `number`, under `name`; the tree has this `fingerprint`."""
        self.name = name
        for handle in self.handles:
            handle.unit = name
        self.observers.number, self.observers.fingerprint = number, fingerprint

    def change_plan(self, **changes: Any) -> None:
        """Change fields of `plan`, from the next pass on."""
        self.plan = attrs.evolve(self.plan, **changes)

    def cast_buffers(self) -> None:
        """Give the buffers the dtype that the plan says, for a forward call that begins now."""
        if self.plan.buffer_dtype is not None:
            self.held.buffers.cast(None if self.computes_in_full_precision else self.plan.buffer_dtype)

    # Copies, and exceptions

    def __getstate__(self) -> tuple[object, ...]:
        """Return the state of a copy, which includes the module, and nothing that a pass leaves behind.

        Raises:
            FlatParamError: inside a pass, or while full parameters are summoned.
        """
        tree = self.module.__dict__.get(TREE)
        if tree is not None:
            tree.drop_remains()
        if self.phase is not Phase.IDLE or self.calls or self.showing.pins:
            raise FlatParamError(
                f"unit {self.name!r}: a sharded model can be copied or pickled only outside of a pass, and not while "
                "its full parameters are summoned"
            )
        self.take_over(frees=True)
        held = self.module, self.held.by_hooks, self.held.buffers, self.held.inner
        return self.name, self.plan, self.handles, held, self.reducer.copy(), self.links

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        """Become a copy, which `revive` completes."""
        name, plan, handles, (module, by_hooks, buffers, inner), reducer, links = state
        held = UnitModule(weakref.ref(module), by_hooks, next_number(plan.topology), buffers, inner=inner)
        type(self).__init__(self, name, plan, handles, held, reducer=reducer, links=links)

    def revive(self) -> bool:
        """Have the module show the shards of a unit that was just copied; false if it is not whole yet."""
        # Units refer to each other, so the module of one may be whole before that unit has any attribute.
        is_whole = hasattr(self, "handles") and all([handle.revive() for handle in self.handles])
        if is_whole and not self.calls:
            self.held.inner.restore()
        return is_whole

    def reset(self, *, drop_gradients: bool) -> None:
        """Return to rest after an exception in any phase; the shards and `.grad` stay as they are.

        Args:
            drop_gradients: drop gradients that were collected and not reduced; after a failed backward they are
                incomplete.
        """
        for call in self.held.calls:
            for lender in call.lent:
                self.give_back(lender)
        self.held.forget_calls()
        self.list_flat_parameters(True)
        # The pass has already reported the error of a failed gather.
        if self.gather is not None:
            with contextlib.suppress(RuntimeError):
                self.gather.wait()
        # The error of a replaced parameter has been raised, and will be again.
        with contextlib.suppress(RuntimeError):
            self.reshard()
        if drop_gradients:
            self.reducer.forget()
            for handle in self.handles:
                handle.drop_gradients()
        # From any phase: the only step that is not in the table.
        self.phase = Phase.IDLE


def device_of(units: Iterable[Unit]) -> torch.device:
    """Return the device of the full parameters of `units`, which share one; the CPU if none has parameters."""
    return next((unit.device for unit in units if unit.handles), _CPU)
