"""A unit: a module and the parameters that it shards together."""

from __future__ import annotations

import contextlib
import weakref
import zlib
from collections.abc import Sequence
from typing import Any, Final

import attrs
import torch
from torch import nn
from typing_extensions import final

from flatparam_comm import (
    Collectives,
    FlatParamError,
    FlatParamHandle,
    Pending,
    Residency,
    Scaled,
    premultiplies,
    scaled,
    takes_parts,
)
from flatparam_runtime.agreement.fingerprint import DeedKind, Fingerprint
from flatparam_runtime.streams import Mark, streams_of
from flatparam_runtime.unit.averaging import Averaging, averaging_over
from flatparam_runtime.unit.buffers import UnitBuffers
from flatparam_runtime.unit.calls import ForwardCall
from flatparam_runtime.unit.comm_hooks import CommHooks
from flatparam_runtime.unit.events import Event, EventKind, Instrument
from flatparam_runtime.unit.initial_weights import InitialWeights
from flatparam_runtime.unit.inner_calls import InnerCalls
from flatparam_runtime.unit.phases import PHASES, Phase
from flatparam_runtime.unit.plan import UnitPlan
from flatparam_runtime.unit.reduction import PART_NBYTES, PartialSum, Reduction

__all__ = ["Unit"]

_COPIED: Final = (
    "name",
    "plan",
    "handles",
    "sync_gradients",
    "requires_all_reduce",
    "divide_factor",
    "hooks",
    "lenders",
    "borrowers",
    "forward_prefetch",
    "backward_prefetch",
    "buffers",
    "inner",
)
"""The attributes that a copy of a unit has too."""


@final
@attrs.frozen
class Wishes:
    """What a caller asks of `summon_full_params`."""

    writeback: bool
    rank0_only: bool
    offload_to_cpu: bool
    with_grads: bool

    @property
    def is_copied(self) -> bool:
        """Whether full parameters are shown in memory of their own, with which nothing can be computed."""
        return self.rank0_only or self.with_grads

    def shows(self, other: Wishes) -> bool:
        """Whether what is shown for these wishes is enough for `other`."""
        return (other.rank0_only or not self.rank0_only) and (self.with_grads or not other.with_grads)


@final
@attrs.define(eq=False)
class Unit:
    """One module's flat parameters and what is happening to them on this rank.

    Invariants: all handles have the same residency between two calls; `phase` is FORWARD exactly while
    `calls` holds a call that is not a recomputation.
    """

    name: str
    """The module's name below the root of its tree; `(root)` for the root itself."""
    plan: UnitPlan
    handles: tuple[FlatParamHandle, ...]
    _module: weakref.ReferenceType[nn.Module]
    number: int = 0
    """Its place in its tree, the same on every rank."""
    phase: Phase = Phase.IDLE
    sync_gradients: bool = True
    """Whether the next backward pass reduces gradients; `no_sync` turns it off."""
    calls: list[ForwardCall] = attrs.field(factory=list)
    """The module's forward calls under way, the innermost last."""
    instruments: list[Instrument] = attrs.field(factory=list)
    unsynced: set[FlatParamHandle] = attrs.field(factory=set)
    """What was trained since the last reduction, by backward passes in `no_sync` or until it was frozen."""
    requires_all_reduce: bool = True
    """Whether reduced shards are summed over their copies, where there are any, or wait for a pass that does."""
    divide_factor: float | None = None
    """What the sum of the gradients is divided by; `None`: by the number of ranks, which makes it their mean."""
    hooks: CommHooks = attrs.field(factory=CommHooks)
    partial: dict[FlatParamHandle, PartialSum] = attrs.field(factory=dict)
    """Reduced shards that wait to be summed over their copies."""
    lenders: list[Unit] = attrs.field(factory=list)
    """Units that hold parameters which this unit's module uses too."""
    borrowers: list[Unit] = attrs.field(factory=list)
    """The other way round."""
    forward_prefetch: Sequence[Unit] | None = None
    """What to gather when this unit's forward begins, instead of what the last pass suggests."""
    backward_prefetch: Sequence[Unit] | None = None
    """The same for its backward."""
    pins: int = 0
    """How many `summon_full_params` contexts keep the full parameters in memory, in full precision."""
    summoned: Wishes | None = None
    """What the outermost of them asked for."""
    summon_stamp: int = 0
    """The stamp of the shards when they were last the same as what is summoned."""
    buffers: UnitBuffers = attrs.field(factory=UnitBuffers)
    inner: InnerCalls = attrs.field(factory=InnerCalls)
    """Of the modules inside it, while it is not called itself."""
    fingerprint: Fingerprint | None = None
    """Where the unit notes its collectives; its tree's."""
    initial_weights: InitialWeights | None = None
    """What it was made of, until the ranks have compared it."""
    initial_stamp: int = 0
    """The stamp of the shards at that time: what was loaded since is not compared."""
    _gathers: list[Pending | Mark] = attrs.field(factory=list)
    gathered: int = 0
    """The stamp of the shards that were gathered last."""
    _is_dormant: bool = False
    """Whether it is a copy whose module does not show its shards yet."""

    def __getstate__(self) -> dict[str, object]:
        """What a copy is made of: the module with it, and none of what a pass leaves behind.

        Raises:
            FlatParamError: inside a pass, or while full parameters are summoned.
        """
        if self.phase is not Phase.IDLE or self.calls or self.pins:
            raise FlatParamError(
                f"unit {self.name!r}: a sharded model can be copied or pickled only outside of a pass, and not while "
                "its full parameters are summoned"
            )
        self.reshard()
        return {name: getattr(self, name) for name in _COPIED} | {"module": self.module}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Become a copy, which `revive` completes."""
        type(self).__init__(
            self, state["name"], state["plan"], state["handles"], weakref.ref(state["module"])
        )
        for name in _COPIED:
            setattr(self, name, state[name])
        self._is_dormant = True

    def revive(self) -> bool:
        """Have the module show the shards of a unit that was just copied; false where it is not whole yet."""
        if self._is_dormant:
            self._is_dormant = not all([handle.revive() for handle in self.handles])
        return not self._is_dormant

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.phase.name}, {list(self.handles)!r})"

    def __str__(self) -> str:
        return f"unit {self.name!r}"

    @property
    def module(self) -> nn.Module:
        """The module whose forward pass needs these parameters.

        Raises:
            FlatParamError: where it is gone.
        """
        module = self._module()
        if module is None:
            raise FlatParamError(
                f"the module of unit {self.name!r} does not exist any more: keep a reference to the model until its "
                "backward pass is over"
            )
        return module

    @property
    def residency(self) -> Residency:
        """What is in memory; SHARDED for a unit without parameters."""
        return self.handles[0].residency if self.handles else Residency.SHARDED

    @property
    def device(self) -> torch.device:
        """Where its full parameters live; the CPU for a unit without parameters."""
        return self.handles[0].device if self.handles else torch.device("cpu")

    def stamp(self) -> int:
        """A number that is another one after every in-place change of the unit's parameters."""
        stamp = 0
        for handle in self.handles:
            stamp += handle.stamp()
        return stamp

    @property
    def trainable(self) -> tuple[FlatParamHandle, ...]:
        """The flat parameters of which some parameter is to get a gradient."""
        return tuple(handle for handle in self.handles if handle.exposure.is_trainable)

    @property
    def is_trainable(self) -> bool:
        """Whether some parameter is to get a gradient."""
        return any(handle.exposure.is_trainable for handle in self.handles)

    @property
    def overlaps_reductions(self) -> bool:
        """Whether gradients of this unit are computed while those of the unit before are reduced."""
        overlaps = self.plan.overlaps_reductions
        return self.device.type != "cpu" if overlaps is None else overlaps

    @property
    def to_reduce(self) -> tuple[FlatParamHandle, ...]:
        """The flat parameters that the next reduction takes: those trained now, or since the last one."""
        if not self.unsynced:
            return self.trainable
        trained = {*self.trainable, *self.unsynced}
        return tuple(handle for handle in self.handles if handle in trained)

    @property
    def averaging(self) -> Averaging:
        """How the sum over ranks becomes a mean."""
        topology = self.plan.topology
        if self.hooks.reduce is not None:  # which averages over its own ranks
            replicas = topology.data_parallel_size // topology.shard.size
            if topology.shard.size == 1 or self.hooks.all_reduce is not None:
                replicas = 1
            return Averaging(after=float(replicas))
        size = topology.data_parallel_size
        if self.hooks.all_reduce is not None:  # likewise, over the copies of a shard
            size = topology.shard.size
        factor = float(size)
        if self.divide_factor is not None:
            factor = self.divide_factor * size / topology.data_parallel_size
        dtypes = frozenset([handle.gradients.dtype for handle in self.handles])
        multiplies = premultiplies(self._group_of_first_sum, self.device)
        return averaging_over(size, factor, dtypes, premultiplies=multiplies, copies=not self.reduces_parts)

    @property
    def reduces_parts(self) -> bool:
        """Whether gradients are reduced from where autograd leaves them, without a flat one."""
        shard = self.plan.topology.shard
        if self.hooks.reduce is not None or self.device.type != "cpu" or shard.size == 1:
            return False
        nbytes = sum(handle.gradients.buffer.nbytes for handle in self.handles)
        count = sum(len(handle.layout.slots) for handle in self.handles)
        return takes_parts(shard) and nbytes >= count * PART_NBYTES.value

    @property
    def _group_of_first_sum(self) -> Collectives:
        topology = self.plan.topology
        return topology.shard if topology.shard.size > 1 or topology.replicate is None else topology.replicate

    @property
    def summing(self) -> Collectives | Scaled:
        """What the first sum of gradients goes over, of those that communicate, with the factor of `averaging`."""
        group, factor = self._group_of_first_sum, self.averaging.factor
        return group if factor == 1.0 else scaled(group, self.device, factor)

    @property
    def is_needed(self) -> bool:
        """Whether a forward call under way uses the full parameters: its own, or one of a unit that shares some."""
        return bool(self.calls or self.pins or any(unit.calls for unit in self.borrowers))

    @property
    def computes_in_full_precision(self) -> bool:
        """Whether a forward call that begins now uses the parameters in their own dtype."""
        return bool(self.pins) or (self.plan.full_precision_in_eval and not self.module.training)

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the full parameters."""
        return sum(handle.buffer.nbytes for handle in self.handles)

    def cast_buffers(self) -> None:
        """Give the buffers the dtype that the plan says for a forward call that begins now."""
        if self.plan.buffer_dtype is not None:
            self.buffers.cast(None if self.computes_in_full_precision else self.plan.buffer_dtype)

    def begin_call(self, call: ForwardCall) -> None:
        """A forward call of the module begins."""
        if not self.calls:
            self.inner.lift()
        self.calls.append(call)

    def end_call(self) -> ForwardCall:
        """The innermost forward call is over."""
        call = self.calls.pop()
        if not self.calls:
            self.inner.put()
        return call

    def move(self, phase: Phase) -> None:
        """Take a step of the phase table."""
        self.phase = PHASES.move(self.phase, phase, who=self)

    def emit(self, kind: EventKind, nbytes: int) -> None:
        """Tell the instruments."""
        event = Event(kind, self.name, self.phase, nbytes)
        for instrument in self.instruments:
            instrument.on_event(event)

    # Parameters

    def begin_unshard(self, *, full_precision: bool = False, copied: bool = False) -> None:
        """Start to gather the full parameters; nothing where they are there or on their way.

        Args:
            full_precision: in their own dtype, whatever the compute dtype.
            copied: in memory of their own, also where nothing is sharded.
        """
        for lender in self.lenders:
            lender.begin_unshard(full_precision=full_precision, copied=copied)
        if self.residency is not Residency.SHARDED or not self.handles:
            return
        if self.instruments:
            self.emit("unshard", self.unsharded_nbytes)
        if self._copies_shards(full_precision, copied):
            try:
                with streams_of(self.device).uploading() as copies:
                    self._gather(full_precision, copied)
            except BaseException:
                for handle in self.handles:
                    handle.unreserve()
                raise
            self._gathers.append(copies.end)
        else:
            self._gather(full_precision, copied)
        self.gathered = self.stamp()

    def _copies_shards(self, full_precision: bool, copied: bool) -> bool:
        """Whether shards are copied to be gathered, which an accelerator does beside what it computes.

        The memory that they are copied to is allocated on the stream that computes, and is given out again there.
        """
        if self.plan.storage_device is None and not streams_of(self.device).runs_ahead:
            return False
        copies = [handle.reserve(full_precision=full_precision, copied=copied) for handle in self.handles]
        return any(copies)

    def _gather(self, full_precision: bool, copied: bool) -> None:
        for handle in self.handles:
            full, shard = handle.begin_unshard(
                full_precision=full_precision, take_over=self.plan.notices_replacement, copied=copied
            )
            self._note("gather", full.nbytes)
            if handle.taken_over:
                self.emit("take over", shard.nbytes)
            if self.hooks.all_gather is None:
                self._gathers.append(self.plan.topology.shard.all_gather(full, shard, label=self.name))
            else:
                self.hooks.all_gather(shard, full)

    def shed(self, *, full_precision: bool) -> None:
        """Free full parameters that are in another dtype than is asked for, where nobody uses them."""
        fit = all(handle.computes_in(full_precision=full_precision) for handle in self.handles)
        if not fit and self.residency is not Residency.SHARDED and not self.is_needed:
            self.reshard()

    def _note(self, kind: DeedKind, nbytes: int) -> None:
        if self.fingerprint is not None:
            self.fingerprint.note(kind, self, nbytes)

    def _note_training(self, handle: FlatParamHandle, was_trained: bool) -> None:
        """Have the ranks compare, at the end of the pass, which parameters of `handle` are trained from now on."""
        self._note("train", zlib.crc32(bytes(handle.trained)))
        if was_trained and not any(handle.trained) and self.plan.topology.data_parallel_size > 1:
            # Another rank may still train it: it is reduced once more, and then all ranks are told of the difference.
            self.unsynced.add(handle)

    def finish_unshard(self) -> None:
        """Wait for the gather and show the full parameters; nothing where they are shown."""
        for lender in self.lenders:
            lender.finish_unshard()
        if self.residency is not Residency.UNSHARDING:
            return
        self._wait_for_gathers()
        for handle in self.handles:
            before = handle.trained
            handle.finish_unshard()
            if handle.trained is not before:
                self._note_training(handle, any(before))
        if self.instruments:
            self.emit("use", self.unsharded_nbytes)

    def unshard(self, *, full_precision: bool = False, copied: bool = False) -> None:
        """Have the module show its full parameters; see `begin_unshard`."""
        self.begin_unshard(full_precision=full_precision, copied=copied)
        self.finish_unshard()

    @property
    def is_stale(self) -> bool:
        """Whether the shards have changed in place since they were gathered."""
        return self.gathered != self.stamp()

    def reshard(self) -> None:
        """Free the full parameters, also where their gather is still under way; nothing where there are none.

        Nothing either while a context keeps them.
        """
        for handle in self.handles:
            if handle.residency is not Residency.SHARDED:
                break
        else:
            return
        if self.pins:
            return
        self._wait_for_gathers()  # the buffer must not go while bytes are being written to it
        for handle in self.handles:
            if handle.residency is not Residency.SHARDED:
                handle.reshard()
        if self.instruments:
            self.emit("reshard", self.unsharded_nbytes)

    def show(self, values: Sequence[Sequence[nn.Parameter | None]]) -> None:
        """Show `values` (for each handle, one per parameter) instead of the sharded form, and list them alone."""
        for handle, parameters in zip(self.handles, values, strict=True):
            handle.exposure.show(parameters)
            handle.exposure.list_flat_parameter(False)

    def show_shard(self) -> None:
        """Undo `show`."""
        for handle in self.handles:
            handle.exposure.show_shard()
            handle.exposure.list_flat_parameter(True)

    def _wait_for_gathers(self) -> None:
        if not self._gathers:
            return
        gathers, self._gathers = self._gathers, []
        errors = []
        for pending in gathers:
            try:
                pending.wait()
            except (
                RuntimeError
            ) as error:  # the others write to memory that is about to be freed: wait for them too
                errors.append(error)
        if errors:
            raise errors[0]

    # Gradients

    def begin_reduce(self, handles: Sequence[FlatParamHandle]) -> Reduction:
        """Start to reduce the collected gradients of `handles` to this rank's shards."""
        self.move(Phase.REDUCING)
        self.unsynced.clear()
        if self.instruments:
            self.emit("reduce", sum(handle.gradients.buffer.nbytes for handle in handles))
        for handle in handles:
            self._note("reduce", handle.gradients.buffer.nbytes)
        return Reduction.begin(self, handles)

    def reset(self, *, drop_gradients: bool) -> None:
        """Come back to rest after an exception, whatever was under way; the shards and `.grad` stay as they are.

        Args:
            drop_gradients: forget what was collected and not reduced; a failed backward leaves it incomplete.
        """
        self.calls.clear()
        self.inner.put()
        with contextlib.suppress(RuntimeError):  # a gather that failed with the pass has nothing more to say
            self._wait_for_gathers()
        with contextlib.suppress(
            RuntimeError
        ):  # a parameter that was replaced has been reported, and will be again
            self.reshard()
        if drop_gradients:
            self.unsynced.clear()
            self.partial.clear()
        for handle in self.handles if drop_gradients else ():
            handle.gradients.release()
            for leaf in handle.leaves:
                leaf.grad = None
        self.phase = Phase.IDLE  # from wherever it was: the one step that is not in the table
