"""The reductions under way in a backward pass, and the gradients that parameters get at its end."""

from __future__ import annotations

import collections
from collections.abc import Sequence
from typing import Final, TypeAlias, final

import attrs
import torch

from flatparam_comm import Averaging, FlatParamError, FlatParamHandle, Reduced, Reduction, Threshold, streams_of
from flatparam_runtime.agreement.comparison import Comparison, compare_gradients
from flatparam_runtime.agreement.fingerprint import Fingerprint
from flatparam_runtime.autograd import profiled
from flatparam_runtime.optimizers import acts_in_backward, step_in_backward
from flatparam_runtime.unit import Phase, Unit, device_of

MAX_REDUCTIONS_IN_FLIGHT: Final = Threshold(
    "runtime.reductions_in_flight",
    1,
    "Up to so many units' gradients are reduced while the next unit's are computed; one more waits for the oldest.",
)
"""While one unit's gradients are reduced, the next unit's are computed; these are collected after the reduction."""

InFlight: TypeAlias = tuple[Unit, Reduction]
"""A unit, and the reduction in flight of its gradients."""


@final
@attrs.define(eq=False)
class Reductions:
    """The reductions of one backward pass: first among the ranks that share parameters, then among the copies.

    A gradient goes to its parameter as soon as its reduction is over, unless the parameter has to wait for the end of
    the pass (`_held`).
    """

    runs_ahead: bool
    """Whether the device runs ahead of the host."""
    has_begun: bool = False
    """Whether any was issued."""
    reducing: collections.deque[InFlight] = attrs.field(factory=collections.deque)
    """Those in flight among the ranks that share a unit's parameters, the oldest first."""
    _replicating: collections.deque[InFlight] = attrs.field(factory=collections.deque)
    """Those in flight among the copies of each shard, the oldest first."""
    _held: list[Reduced] = attrs.field(factory=list)
    """Reduced gradients that parameters get at the end: this rank alone does not know which parameters got a gradient,
    or the copy to the host is still in flight."""
    _undivided: dict[float, list[torch.Tensor]] = attrs.field(factory=dict)
    """By their divisor, gradients that parameters have and that are divided at the end, by one kernel for all."""
    _given: dict[FlatParamHandle, bytes] = attrs.field(factory=dict)
    """For each flat parameter that was reduced, a flag for each parameter: this rank had a gradient of it."""

    def issue(self, unit: Unit, averaging: Averaging) -> None:
        """Issue the reduction of the gradients that `unit` has collected with these factors, if it has any."""
        handles, unsynced = unit.trainable, unit.reducer.unsynced
        if unsynced:
            # Those that are trained now, or were since the last reduction.
            handles = tuple(h for h in unit.handles if h in unsynced or h in handles)
        if not handles:
            return
        if self.reducing:
            self.make_room()
        if unit.observers.guard is not None:
            unit.observers.guard.look_before_reduction(unit, handles)
        reduction = unit.begin_reduce(handles, averaging)
        self.reducing.append((unit, reduction))
        self.has_begun = True
        has_copies = unit.plan.topology.replicate is not None
        # The only collective is the sum over the copies; one such sum stays in flight.
        if has_copies and self.overlaps(unit) and not reduction.is_under_way:
            self._advance()

    def overlaps(self, unit: Unit) -> bool:
        """Return whether gradients of `unit` are computed while those of the unit before are reduced."""
        overlaps = unit.plan.overlaps_reductions
        return self.runs_ahead if overlaps is None else overlaps

    def make_room(self) -> None:
        """Wait for the oldest reductions until one more may be in flight."""
        while len(self.reducing) >= MAX_REDUCTIONS_IN_FLIGHT.value:
            self._wait_for_oldest()

    @profiled("rate_limiter")
    def _wait_for_oldest(self) -> None:
        self._advance()

    def settle_until(self, unit: Unit) -> None:
        """Finish the reductions in flight up to that of `unit`, if `unit` has one."""
        while unit.phase is Phase.REDUCING and self._replicating:
            self._settle(*self._replicating.popleft())
        while unit.phase is Phase.REDUCING and self.reducing:
            self._advance(keep=0)

    def _advance(self, *, keep: int = 1) -> None:
        """Move the oldest reduction on to the copies; up to `keep` of these stay in flight, if they can."""
        unit, reduction = self.reducing.popleft()
        if unit.observers.instruments:
            unit.observers.waits(unit, "reduce_scatter")
        nbytes = reduction.replicate()
        if unit.observers.instruments:
            unit.observers.tell(unit, "finish", nbytes)
        self._replicating.append((unit, reduction))
        if not (keep and self.overlaps(unit) and reduction.is_under_way):
            keep = 0
        while len(self._replicating) > keep:
            self._settle(*self._replicating.popleft())

    def _settle(self, unit: Unit, reduction: Reduction) -> None:
        # A kernel for each would delay the computation that it lies between.
        settled = reduction.settle(divides=not self.runs_ahead)
        unit.move(Phase.IDLE)
        for reduced in settled:
            handle, arrived = reduced.handle, reduced.arrived
            before = self._given.get(handle)
            self._given[handle] = (
                arrived if before is None else bytes(a | b for a, b in zip(before, arrived, strict=True))
            )
            if all(arrived) and reduced.landed is None:
                self._give(reduced, arrived)
            else:
                # The last of these was reduced one unit ago: its copy is over, or nearly over.
                if self._held:
                    self._held[-1].let_go()
                self._held.append(reduced)

    def settle(self) -> None:
        """Finish every reduction in flight."""
        while self.reducing:
            self._advance()
        while self._replicating:
            self._settle(*self._replicating.popleft())
        self._divide()

    def _give(self, reduced: Reduced, arrived: bytes) -> None:
        handle, gradient, divisor = reduced.handle, reduced.gradient, reduced.divisor
        if divisor != 1.0:
            # What somebody adds it to, or uses at once, needs its value now; that may wait to be divided, too.
            if acts_in_backward(handle) or any(p.grad is not None for p in handle.exposure.parameters()):
                self._divide()
                gradient.div_(divisor)
            else:
                self._undivided.setdefault(divisor, []).append(gradient)
        handle.accumulate(gradient, arrived)
        step_in_backward(handle, arrived)

    def _divide(self) -> None:
        for divisor, gradients in self._undivided.items():
            torch._foreach_div_(gradients, divisor)
        self._undivided.clear()

    def give_held(self, units: Sequence[Unit], fingerprint: Fingerprint) -> Comparison | None:
        """Give the gradients to the parameters that got one on any rank; the `.grad` of all others stays `None`.

        Returns:
            The comparison of what the ranks did; `None` while the step is captured in a graph.
        """
        if streams_of(device_of(units)).is_capturing:
            self._give_captured(units)
            return None
        comparison = compare_gradients(units, self._given, fingerprint, self._look(units))
        all_here = all(all(reduced.arrived) for reduced in self._held)
        arrived_anywhere = {} if all_here else comparison.read()
        for reduced in reversed(self._held):
            # The earlier copies were made on the same stream, so they have landed then, too.
            if reduced.landed is not None:
                reduced.landed.synchronize()
                break
        for reduced in self._held:
            arrived = reduced.arrived if all(reduced.arrived) else arrived_anywhere[reduced.handle]
            self._give(reduced, arrived)
        self._held.clear()
        self._divide()
        return comparison

    def _look(self, units: Sequence[Unit]) -> bool | None:
        """Return whether a gradient of this rank is not finite; None if nobody asks."""
        guard = units[0].observers.guard
        if guard is None:
            return None
        for reduced in self._held:
            if reduced.landed is not None:
                reduced.landed.synchronize()
        return guard.look(units, [reduced.gradient for reduced in self._held])

    def _give_captured(self, units: Sequence[Unit]) -> None:
        """Give the gradients without a look from the host; the next pass that is not captured compares this one too."""
        if units[0].observers.guard is not None:
            raise FlatParamError(
                "a backward pass is being captured in a graph, but with nonfinite='raise' or 'skip' the host has to "
                "look at each pass; do not capture it, or pass nonfinite='ignore'"
            )
        alone = all(unit.topology.data_parallel_size == 1 for unit in units)
        for reduced in self._held:
            if reduced.landed is not None or not (alone or all(reduced.arrived)):
                why = (
                    "its gradients are offloaded"
                    if reduced.landed is not None
                    else "not every parameter of it got a gradient"
                )
                raise FlatParamError(
                    f"{reduced.handle}: a backward pass is being captured in a graph, but {why}, so that the host has "
                    "to look at what comes from the device; capture the step without this unit, or do not capture it"
                )
        # Give gradients only now: if one is refused, no parameter gets any.
        for reduced in self._held:
            self._give(reduced, reduced.arrived)
        self._held.clear()
        self._divide()

    def drop(self) -> None:
        """Drop everything after an exception; wait for what is in flight, since it owns memory."""
        for _, reduction in (*self.reducing, *self._replicating):
            reduction.drop()
        for reduced in self._held:
            reduced.let_go()
        # Parameters have them.
        self._divide()
        self.reducing.clear()
        self._replicating.clear()
        self._held.clear()
