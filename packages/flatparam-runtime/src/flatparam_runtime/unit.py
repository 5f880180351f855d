"""A unit: a module and the parameters that it shards together."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Sequence

import attrs
from torch import Tensor, nn
from typing_extensions import final

from flatparam_comm import FlatParamError, FlatParamHandle, Pending, Residency
from flatparam_runtime.averaging import gradient_divisors
from flatparam_runtime.calls import ForwardCall
from flatparam_runtime.events import Event, EventKind, Instrument
from flatparam_runtime.phases import PHASES, Phase
from flatparam_runtime.plan import UnitPlan

__all__ = ["Reduction", "Unit"]

_NO_COPY = (
    "unit {!r}: a sharded module can be neither copied nor pickled yet; copy or save the module before "
    "it is sharded, or "
    "save its state_dict()"
)


@final
@attrs.define(eq=False)
class Reduction:
    """The gradients of one unit on their way: owns the tensors until it is settled."""

    unit: Unit
    parts: list[tuple[FlatParamHandle, Tensor, Pending]]
    """For each flat parameter, the shard of the sum that is being made, and what to wait for."""

    def settle(self) -> list[tuple[FlatParamHandle, Tensor, bytes]]:
        """Wait, free the unsharded gradients, and return each handle's mean and which parameters this rank gave."""
        _, after = gradient_divisors(self.unit.plan.topology.data_parallel_size)
        settled = []
        for handle, output, pending in self.parts:
            pending.wait()
            arrived = bytes(handle.gradients.deposited)
            settled.append((handle, handle.settle_reduce(output, divisor=after), arrived))
        self.unit.emit("finish", sum(handle.gradients.buffer.nbytes for handle, _, _ in self.parts))
        self.unit.move(Phase.IDLE)
        return settled


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
    phase: Phase = Phase.IDLE
    sync_gradients: bool = True
    """Whether the next backward pass reduces gradients; `no_sync` turns it off."""
    calls: list[ForwardCall] = attrs.field(factory=list)
    """The module's forward calls under way, the innermost last."""
    instruments: list[Instrument] = attrs.field(factory=list)
    unsynced: set[FlatParamHandle] = attrs.field(factory=set)
    """What was trained by backward passes in `no_sync` since the last reduction: the same on every rank."""
    watches_leaves: bool = False
    """Whether the hooks on the handles' leaves are there; leaves come to be when they are first shown."""
    _gathers: list[Pending] = attrs.field(factory=list)
    _gathered: int = -1
    """The stamp of the shards that were gathered last."""

    def __deepcopy__(self, memo: dict[int, object]) -> Unit:
        raise FlatParamError(_NO_COPY.format(self.name))

    def __reduce_ex__(self, protocol: object) -> str:
        raise FlatParamError(_NO_COPY.format(self.name))

    def __repr__(self) -> str:
        return f"Unit({self.name!r}, {self.phase.name}, {list(self.handles)!r})"

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

    def stamp(self) -> int:
        """A number that is another one after every in-place change of the unit's parameters."""
        return sum(handle.stamp() for handle in self.handles)

    @property
    def trainable(self) -> tuple[FlatParamHandle, ...]:
        """The flat parameters of which some parameter is to get a gradient."""
        return tuple(handle for handle in self.handles if any(handle.exposure.requires_grad()))

    @property
    def to_reduce(self) -> tuple[FlatParamHandle, ...]:
        """The flat parameters that the next reduction takes: those trained now, or since the last one."""
        trained = {*self.trainable, *self.unsynced}
        return tuple(handle for handle in self.handles if handle in trained)

    @property
    def unsharded_nbytes(self) -> int:
        """Bytes of the full parameters."""
        return sum(handle.buffer.nbytes for handle in self.handles)

    def move(self, phase: Phase) -> None:
        """Take a step of the phase table."""
        self.phase = PHASES.move(self.phase, phase, who=f"unit {self.name!r}")

    def emit(self, kind: EventKind, nbytes: int) -> None:
        """Tell the instruments."""
        if self.instruments:
            event = Event(kind, self.name, self.phase, nbytes)
            for instrument in self.instruments:
                instrument.on_event(event)

    # Parameters

    def begin_unshard(self) -> None:
        """Start to gather the full parameters; nothing where they are there or on their way."""
        if self.residency is not Residency.SHARDED or not self.handles:
            return
        self.emit("unshard", self.unsharded_nbytes)
        self._gathered = self.stamp()
        for handle in self.handles:
            full, shard = handle.begin_unshard()
            self._gathers.append(self.plan.topology.shard.all_gather(full, shard, label=self.name))

    def finish_unshard(self) -> None:
        """Wait for the gather and show the full parameters; nothing where they are shown."""
        if self.residency is not Residency.UNSHARDING:
            return
        self._wait_for_gathers()
        for handle in self.handles:
            handle.finish_unshard()
        self.emit("use", self.unsharded_nbytes)

    def unshard(self) -> None:
        """Have the module show its full parameters."""
        self.begin_unshard()
        self.finish_unshard()

    @property
    def is_stale(self) -> bool:
        """Whether the shards have changed in place since they were gathered."""
        return self._gathered != self.stamp()

    def reshard(self) -> None:
        """Free the full parameters, also where their gather is still under way; nothing where there are none."""
        if all(handle.residency is Residency.SHARDED for handle in self.handles):
            return
        self._wait_for_gathers()  # the buffer must not go while bytes are being written to it
        for handle in self.handles:
            if handle.residency is not Residency.SHARDED:
                handle.reshard()
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
        self.emit("reduce", sum(handle.gradients.buffer.nbytes for handle in handles))
        parts = []
        for handle in handles:
            output, full = handle.begin_reduce()
            pending = self.plan.topology.shard.reduce_scatter(output, full, label=self.name)
            parts.append((handle, output, pending))
        return Reduction(self, parts)

    def reset(self, *, drop_gradients: bool) -> None:
        """Come back to rest after an exception, whatever was under way; the shards and `.grad` stay as they are.

        Args:
            drop_gradients: forget what was collected and not reduced; a failed backward leaves it incomplete.
        """
        self.calls.clear()
        with contextlib.suppress(RuntimeError):  # a gather that failed with the pass has nothing more to say
            self._wait_for_gathers()
        with contextlib.suppress(
            RuntimeError
        ):  # a parameter that was replaced has been reported, and will be again
            self.reshard()
        if drop_gradients:
            self.unsynced.clear()
        for handle in self.handles if drop_gradients else ():
            handle.gradients.release()
            for leaf in handle.leaves:
                leaf.grad = None
        self.phase = Phase.IDLE  # from wherever it was: the one step that is not in the table
