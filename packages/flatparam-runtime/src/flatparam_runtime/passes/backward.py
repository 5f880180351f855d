"""One backward pass: the gradients that each unit still waits for, and the turn of each unit to be reduced."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Final, TypeAlias, final

import attrs
import torch
from torch.autograd.graph import Node
from typing_extensions import Self

from flatparam_comm import Averaging, BufferPool, FlatParamError, OnDevice, tell_failure
from flatparam_runtime.agreement.comparison import Comparison
from flatparam_runtime.agreement.fingerprint import Fingerprint
from flatparam_runtime.autograd import (
    call_at_end,
    current_run,
    in_backward,
    in_range,
    latest,
    on_failed_run,
    profiled,
    will_run,
)
from flatparam_runtime.passes.order import ForwardPass
from flatparam_runtime.passes.reductions import Reductions
from flatparam_runtime.unit import BackwardOrder, ForwardCall, Phase, Unit, leaf_watches, note_waiting

__all__ = ["BackwardPass", "notice_failed_passes"]

MOMENT: Final = 1.0
"""In seconds, the time to wait, at most, for an interrupted pass that seems to be running in another thread."""


LeafKey: TypeAlias = tuple[int, int]
"""A leaf of a unit: the number of its handle, and its index there."""


@final
@attrs.define(eq=False)
class UnitBackward:
    """The leaves and inputs of a unit whose gradients the engine is going to compute, and for which the unit waits."""

    leaves: set[LeafKey]
    averaging: Averaging
    """The factors that make the mean of these gradients over ranks."""
    keeps: bool
    """Whether gradients stay where autograd leaves them until the unit is complete."""
    run: int
    """The autograd run that computes these gradients. A reentrant checkpoint has an inner run of its own, which may
    reach a leaf that the outer run reaches too."""
    inputs: set[object] = attrs.field(factory=set)
    keeps_parameters: bool = False
    """Whether the full parameters stay until the end of the pass."""


def notice_failed_passes() -> None:
    """Have the ranks that wait told of each exception that comes out of a backward pass; a second call does nothing.

    It changes the function of torch that runs backward passes. Without it, they are told of exceptions after the
    first gradient of a unit, but not which ones. The wrapper calls it.
    """
    on_failed_run(_tell)


def _tell(error: BaseException) -> None:
    tell_failure(error, "backward pass")


@final
@attrs.define(eq=False)
class _EndOfBackward:
    """The callback that autograd holds as long as its backward runs; an exception there frees the callback too.

    The ranks that wait for this one are told of the exception; autograd keeps it to itself until `backward()` raises.
    """

    call: Callable[[], None]
    was_called: bool = False

    def __call__(self) -> None:
        self.was_called = True
        try:
            self.call()
        except BaseException as error:
            tell_failure(error, "backward pass")
            raise

    def __del__(self) -> None:
        if not self.was_called:
            tell_failure(None, "backward pass")


def _no_callback() -> None:
    """No callback: the pass is over."""


@final
@attrs.define(eq=False)
class BackwardPass:
    """The state of one backward pass of a tree.

    The pass begins with the first gradient that reaches an output of a unit, and ends with autograd's final callback.
    A unit is complete as soon as the engine has computed every gradient of the unit's parameters that it is going to
    compute, and that of the unit's latest input; the engine tells in advance which ones these are. Then the unit's full
    parameters are freed. Its reduction is issued when the units that began after it in the forward pass are complete
    too. So the order of reductions is the same on every rank, even if ranks use different parameters of a unit.
    """

    units: Sequence[Unit]
    forward: ForwardPass
    """The forward pass that is differentiated."""
    fingerprint: Fingerprint
    pool: BufferPool
    on_end: Callable[[bool], None]
    """Called at the end: whether gradients were reduced."""
    expected: dict[Unit, set[LeafKey]]
    """The units with a parameter that will get a gradient and that are not complete yet, the last to begin first."""
    active: dict[Unit, UnitBackward] = attrs.field(factory=dict)
    entered: set[Unit] = attrs.field(factory=set)
    kept: set[Unit] = attrs.field(factory=set)
    """The complete units whose full parameters stay until the end of the pass: code around them may still read some."""
    calls: dict[Unit, ForwardCall] = attrs.field(factory=dict)
    """For each unit that was entered, the forward call that is differentiated: the unit's last one."""
    ready: dict[Unit, Averaging] = attrs.field(factory=dict)
    """The complete units that wait for their turn to be reduced, with the factors that they have collected with."""
    reductions: Reductions = attrs.field(kw_only=True)
    to_enter: set[Unit] = attrs.field(init=False)
    """The expected units that no gradient has reached yet: their full parameters may still have to be gathered."""
    has_computed: bool = False
    """Whether autograd has computed every gradient, so that nothing needs full parameters any more."""
    comparison: Comparison | None = None
    """The comparison of the ranks at the end."""
    run: int = attrs.field(factory=current_run)
    """The autograd run that the pass began in."""
    is_last: bool = False
    """Whether, as far as is known, nobody has another graph for a backward pass to come."""
    lent: dict[Unit, list[Unit]] = attrs.field(factory=dict)
    """For each unit, those of which its forward calls have read parameters, and that lend them again."""
    callback: Callable[[], _EndOfBackward | None] = _no_callback
    """The callback, if the autograd run that this pass began in is still running: autograd alone holds it."""

    @to_enter.default
    def _everything_expected(self) -> set[Unit]:
        return {*self.expected}

    @classmethod
    def begin(
        cls,
        units: Sequence[Unit],
        forward: ForwardPass,
        fingerprint: Fingerprint,
        pool: BufferPool,
        streams: OnDevice,
        on_end: Callable[[bool], None],
    ) -> Self:
        """A pass for the autograd run that this thread is in."""
        expected = {}
        for unit in sorted(units, key=forward.place, reverse=True):
            leaves = _hooked_leaves_to_come(unit)
            if leaves or _has_more_to_come(unit):
                expected[unit] = leaves
        current = cls(
            units, forward, fingerprint, pool, on_end, expected, reductions=Reductions(streams.runs_ahead)
        )
        callback = _EndOfBackward(current.finish)
        current.callback = weakref.ref(callback)
        call_at_end(callback)
        return current

    def wait_if_dying(self) -> None:
        """Give autograd's own threads, which an accelerator has, a moment to free a pass that an exception interrupted.

        The interrupted call of `backward()` may return before these threads free the pass. A pass that runs in another
        thread is alive after the moment, too.
        """
        # The caller is inside a pass.
        if in_backward():
            return
        until = time.monotonic() + MOMENT
        while self.callback() is not None and time.monotonic() < until:
            time.sleep(0.001)

    # Reports from hooks

    @profiled("_pre_backward_hook")
    def enter(self, unit: Unit, call: ForwardCall, *, again: bool = False) -> None:
        """A gradient has reached an output of `call`, a forward call of `unit`.

        Args:
            again: the gradient has reached one that an earlier backward pass made (`create_graph`), and so the graph of
                that pass, which reads the parameters too.

        Raises:
            FlatParamError: if the parameters have changed since the forward call.
        """
        state = self.active.get(unit)
        self.calls.setdefault(unit, call)
        if state is None or unit not in self.entered:
            _check_unchanged(unit, call)
            state = state or self._activate(unit)
            self.entered.add(unit)
            if not self.reductions.overlaps(unit):
                self.reductions.make_room()
            if unit.plan.unshards_in_backward:
                unit.begin_unshard(full_precision=call.full_precision)
            self.to_enter.discard(unit)
            if not (self.to_enter and unit.plan.free_after_forward):
                # Nothing more is gathered: gradients can have the pooled memory of full parameters.
                self.pool.trim()
            for lender in unit.links.lenders:
                # A lender in a different tree has its own pass.
                if lender.observers.fingerprint is self.fingerprint and lender not in self.active:
                    self._hook_the_rest(lender, self._activate(lender))
            self._prefetch(unit, BackwardOrder.BEFORE_COMPUTE)
            if unit.plan.unshards_in_backward:
                unit.finish_unshard()
        if call.lent:
            self._have_lent(unit, call)
        state.inputs.update(_last_to_arrive(call))
        # If gradients are enabled, each gradient has a graph, which is watched too.
        if torch.is_grad_enabled() or (not state.inputs and not self._is_last(unit, call)):
            self._hook_the_rest(unit, state)
        # Without an input to wait for, nothing says when a reentrant recomputation inside last needs the parameters;
        # and in the graph of a gradient nothing says which node reads them last.
        state.keeps_parameters = state.keeps_parameters or again or not call.inputs

    def _have_lent(self, unit: Unit, call: ForwardCall) -> None:
        """Have the full parameters that `call` has read of other units in place, until `unit` is complete."""
        known = self.lent.setdefault(unit, [])
        for lender in call.lent:
            if lender not in known:
                unit.borrow(lender, lender.name)
                self.lent[unit].append(lender)
                lender.unshard(full_precision=call.full_precision)
                if lender not in self.active:
                    self._hook_the_rest(lender, self._activate(lender))

    def _is_last(self, unit: Unit, call: ForwardCall) -> bool:
        """Whether only the end of the pass waits for `unit`.

        The code around the outermost unit may use its parameters too, and only their gradients tell of that.
        """
        return not call.is_top and next(reversed(self.expected), None) is unit

    def gradient_arrived(self, unit: Unit, number: int, index: int) -> None:
        """The gradient of parameter `index` of the unit's flat parameter `number` is finished."""
        state = self.active.get(unit) or self._activate(unit)
        handle, divisor = unit.handles[number], state.averaging.before
        if state.keeps:
            handle.keep([index], divisor=divisor)
        else:
            handle.deposit(index, divisor=divisor)
        key = (number, index)
        # In a different autograd run, more of this gradient may follow.
        if key in state.leaves and current_run() == state.run:
            state.leaves.discard(key)
            self._complete_if_done(unit, state)

    def input_arrived(self, unit: Unit, token: object) -> None:
        """The gradient of an input of `unit` is finished."""
        state = self.active.get(unit)
        if state is not None and token in state.inputs:
            state.inputs.discard(token)
            self._complete_if_done(unit, state)

    # Consequences of the reports

    def _complete_if_done(self, unit: Unit, state: UnitBackward) -> None:
        if state.leaves or state.inputs or current_run() != state.run:
            return
        self._hook_the_rest(unit, state)
        if not state.leaves and not (state.keeps_parameters and self._is_alone(unit)):
            self._complete(unit)

    def _is_alone(self, unit: Unit) -> bool:
        """Whether the pass waits for no other unit: `finish` comes next, which frees parameters before it collects."""
        return self.active.keys() | self.expected.keys() == {unit}

    def _hook_the_rest(self, unit: Unit, state: UnitBackward) -> None:
        """Hook the leaves whose gradients are still to come: this pass and every later one waits for them."""
        for number, handle, watch in leaf_watches(unit.handles):
            missing = watch.missing() if handle.exposure.is_trainable else ()
            if missing:
                watch.hook(missing)
                state.leaves.update((number, index) for index in missing)

    def _collect(self, unit: Unit, averaging: Averaging) -> None:
        """Take the gradients of leaves without a hook, and those that were kept."""
        # Wait before one more buffer is taken; the reduction would have to wait anyway.
        syncs = unit.reducer.synchronises
        trained = [each for each in leaf_watches(unit.handles) if each[1].exposure.is_trainable]
        if syncs and (trained or unit.reducer.unsynced):
            self.reductions.make_room()
        for _, handle, watch in trained:
            take = handle.keep if averaging.in_parts and syncs else handle.deposit_all
            take(watch.unhooked, divisor=averaging.before)

    def _activate(self, unit: Unit) -> UnitBackward:
        if unit.phase is Phase.REDUCING:
            self.reductions.settle_until(unit)
        if unit.phase is Phase.FORWARD:
            raise RuntimeError(
                f"unit {unit.name!r}: a backward pass reached the unit while its forward call was still running"
            )
        if unit.phase is Phase.BACKWARD:
            raise FlatParamError(
                f"unit {unit.name!r}: it is in the backward pass of a model, and in that of a different model that "
                "shares it; call backward() once, on the sum of the losses, or finish one model's forward and backward "
                "pass before the other's, or wrap one module around both models"
            )
        # The unit was complete, and a gradient reaches it again: the collected gradients stay.
        self.ready.pop(unit, None)
        unit.move(Phase.BACKWARD)
        averaging = unit.reducer.averaging(unit.handles)
        keeps = (averaging.in_parts and unit.reducer.synchronises) or self.reductions.runs_ahead
        if unit in self.expected:
            state = UnitBackward(self.expected[unit], averaging, keeps, self.run)
        else:
            state = UnitBackward(_hooked_leaves_to_come(unit), averaging, keeps, current_run())
        # A gradient of a reentrant checkpoint's inner run may come when the unit was complete.
        state.keeps_parameters = unit in self.kept
        self.active[unit] = state
        return state

    def _prefetch(self, unit: Unit, when: BackwardOrder) -> None:
        plan, listed = unit.plan.prefetch, unit.links.backward_prefetch
        # What the user has listed is gathered before the unit computes, whatever the plan says.
        if when is not (plan.backward if listed is None else BackwardOrder.BEFORE_COMPUTE):
            return
        before = when is BackwardOrder.BEFORE_COMPUTE
        name = "_pre_backward_prefetch" if before else "_post_backward_prefetch"
        if listed is None:
            in_range(name, self._gather_ahead, self.forward.before(unit), plan.backward_depth)
        else:
            in_range(name, self._gather_ahead, listed, len(listed))

    def _gather_ahead(self, units: Iterable[Unit], count: int) -> None:
        # What is gathered now would stay in memory, and go stale, until the next pass.
        if self.has_computed:
            return
        for unit in units:
            if not count:
                return
            if unit not in self.entered and unit.plan.unshards_in_backward:
                unit.begin_unshard(full_precision=unit.computes_in_full_precision)
                count -= 1

    def _complete(self, unit: Unit) -> None:
        in_range(
            lambda: "_post_backward_hook" if unit.is_trainable else "_post_backward_hook_reshard_only",
            self._leave,
            unit,
        )

    def _leave(self, unit: Unit) -> None:
        state = self.active.pop(unit)
        self.expected.pop(unit, None)
        if state.keeps_parameters:
            self.kept.add(unit)
        else:
            self._free(unit)
        for lender in unit.links.lenders:
            if lender not in self.active:
                self._free(lender)
        if self.lent:
            self._give_back(unit)
        # Collect only now: the buffer of the gradients may take the memory of the full parameters.
        self._collect(unit, state.averaging)
        unit.move(Phase.IDLE)
        if not unit.reducer.synchronises:
            unit.reducer.unsynced.update(unit.trainable)
        if not (unit.reducer.synchronises and unit.reducer.sums_copies):
            note_waiting(unit)
        self.ready[unit] = state.averaging
        self._reduce_ready()

    def _give_back(self, unit: Unit) -> None:
        for lender in self.lent.pop(unit, ()):
            unit.give_back(lender)

    def _free(self, unit: Unit) -> None:
        """Free the full parameters, unless an active unit borrows some."""
        is_lent = not self.active.keys().isdisjoint(unit.links.borrowers)
        if not is_lent:
            self._reshard(unit)

    def _reshard(self, unit: Unit) -> None:
        if unit.reducer.synchronises or unit.plan.free_after_unsynced_backward:
            # The graph of a gradient may have full parameters.
            unit.reshard(is_computed=self.is_last and not torch.is_grad_enabled())

    def _reduce_ready(self, *, all_of_them: bool = False) -> None:
        """Issue the reductions whose turn has come: of the complete units, the last to begin first."""
        place = self.forward.place
        awaited = -1 if all_of_them or not self.expected else place(next(iter(self.expected)))
        # Most wait alone.
        ready = self.ready if len(self.ready) == 1 else sorted(self.ready, key=place, reverse=True)
        for unit in [*ready]:
            if place(unit) < awaited:
                return
            averaging = self.ready.pop(unit)
            self._prefetch(unit, BackwardOrder.AFTER_COMPUTE)
            if unit.reducer.synchronises:
                self.reductions.issue(unit, averaging)

    def finish(self) -> None:
        """Complete the units that still wait, and give every gradient to its parameter; autograd has computed all."""
        try:
            self._finish()
        except BaseException:
            # The traceback keeps the callback, but this pass is over.
            self.callback = _no_callback
            raise

    def _finish(self) -> None:
        self.has_computed = True
        for unit in self.units:
            # No hook reported the unit: its outputs hide their tensors.
            if unit not in self.active and _has_gradients_left(unit):
                self._activate(unit)
        for unit in self.units:
            # Full parameters that were kept for the whole pass, prefetched in vain, or used in the forward pass only.
            self._reshard(unit)
        for unit in list(self.active):
            self._complete(unit)
        self._reduce_ready(all_of_them=True)
        for unit in self.units:
            # The gradients were collected earlier, and this pass has not reached the unit.
            if unit.reducer.synchronises and unit.reducer.unsynced and unit.phase is Phase.IDLE:
                self.reductions.issue(unit, unit.reducer.averaging(unit.handles))
        self.reductions.settle()
        if self.reductions.has_begun:
            self.comparison = self.reductions.give_held(self.units, self.fingerprint)
        self.on_end(self.reductions.has_begun)

    def drop(self) -> None:
        """Drop everything after an exception; wait for the reductions in flight, since they own memory."""
        self.reductions.drop()
        for unit in [*self.lent]:
            self._give_back(unit)
        self.active.clear()
        self.ready.clear()


def _check_unchanged(unit: Unit, call: ForwardCall) -> None:
    for handle in unit.handles:
        if handle.is_unsharded:
            handle.check_leaves()
    if call.stamp != unit.stamp():
        raise FlatParamError(
            f"unit {unit.name!r} on rank {unit.topology.rank}: its parameters were changed (by an optimizer "
            "step, by loading, or in place) between its forward pass and the backward pass through it; run backward "
            "first"
        )


def _last_to_arrive(call: ForwardCall) -> Collection[object]:
    """The inputs of `call`, as tokens, whose gradients tell that the unit's backward is over.

    These are, of each device, the leaves and the latest of the others. An earlier one may get its gradient much later,
    as other units use it too: keys of earlier layers in a cache, or the output of an encoder.
    """
    arriving = dict(call.inputs)
    for token, (node, _) in call.inputs.items():
        if not will_run(node):
            del arriving[token]
    if len(arriving) < 2:
        return arriving.keys()
    by_device: dict[torch.device, dict[object, Node]] = {}
    for token, (node, device) in arriving.items():
        by_device.setdefault(device, {})[token] = node
    return [token for nodes in by_device.values() for token in latest(nodes)]


def _hooked_leaves_to_come(unit: Unit) -> set[LeafKey]:
    found: set[LeafKey] = set()
    for number, _, watch in leaf_watches(unit.handles):
        if watch.hooked:
            found.update((number, index) for index in watch.hooked if watch.will_arrive(index))
    return found


def _has_more_to_come(unit: Unit) -> bool:
    watches = [watch for _, _, watch in leaf_watches(unit.handles)]
    return any([any(map(watch.will_arrive, watch.unhooked)) for watch in watches])


def _has_gradients_left(unit: Unit) -> bool:
    for _, _, watch in leaf_watches(unit.handles):
        for index in watch.unhooked:
            if watch.leaves[index].grad is not None:
                return True
    return False
