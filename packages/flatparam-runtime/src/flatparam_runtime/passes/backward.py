"""One backward pass: the gradients that each unit still waits for, and the turn of each unit to be reduced."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Final, final

import attrs
import torch
from torch.autograd.graph import Node
from typing_extensions import Self

from flatparam_comm import FlatParamError, Residency, tell_failure
from flatparam_runtime.agreement.comparison import Comparison
from flatparam_runtime.autograd import (
    call_at_end,
    compiles,
    current_run,
    in_backward,
    latest,
    on_failed_run,
    profiled,
    untraced,
    will_run,
)
from flatparam_runtime.passes.freeing import Juncture, free
from flatparam_runtime.passes.record import ForwardPass, PassTree, Stage, UnitBackward
from flatparam_runtime.passes.reductions import Reductions
from flatparam_runtime.unit import (
    BackwardOrder,
    ForwardCall,
    Phase,
    Unit,
    WatchedHandle,
    hooked_leaves_to_come,
    leaf_watches,
    note_waiting,
)

_PREFETCHES: Final = {
    BackwardOrder.BEFORE_COMPUTE: "_pre_backward_prefetch",
    BackwardOrder.AFTER_COMPUTE: "_post_backward_prefetch",
}
_LEAVES: Final = ("_post_backward_hook_reshard_only", "_post_backward_hook")
"""The names of a unit's end in a profile: without a parameter that is trained, and with one."""
MOMENT: Final = 1.0
"""In seconds, the time to wait, at most, for an interrupted pass that seems to be running in another thread."""


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

    @untraced
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

    tree: PassTree
    forward: ForwardPass
    """The forward pass that is differentiated."""
    reductions: Reductions
    expected: dict[Unit, UnitBackward]
    """The units with a parameter that will get a gradient and that are not complete yet, the last to begin first."""
    records: dict[Unit, UnitBackward] = attrs.Factory(lambda self: {**self.expected}, takes_self=True)
    """The record of each unit that the pass is to reach, or has reached."""
    ready: list[UnitBackward] = attrs.field(factory=list)
    """The complete units, which wait for their turn to be reduced."""
    has_computed: bool = False
    """Whether autograd has computed every gradient, so that nothing needs full parameters any more."""
    comparison: Comparison | None = None
    """The comparison of the ranks at the end."""
    callback: Callable[[], _EndOfBackward | None] = _no_callback
    """The callback, if the autograd run that this pass began in is still running: autograd alone holds it."""

    @classmethod
    def begin(cls, tree: PassTree) -> Self:
        """Return a pass for the autograd run that this thread is in."""
        forward, expected, run = tree.latest_forward, {}, current_run()
        for unit in sorted(tree.units, key=forward.place, reverse=True):
            watches = leaf_watches(unit.handles)
            leaves = hooked_leaves_to_come(watches)
            if leaves or any([any(map(watch.will_arrive, watch.unhooked)) for _, _, watch in watches]):
                expected[unit] = UnitBackward(unit, leaves, run)
        current = cls(tree, forward, Reductions(tree.streams.runs_ahead), expected)
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

    @property
    def calls(self) -> Iterator[ForwardCall]:
        """The forward calls that are differentiated."""
        return (record.call for record in self.records.values() if record.call is not None)

    def call_of(self, unit: Unit) -> ForwardCall | None:
        """Return the forward call of `unit` that is differentiated, if a gradient has reached it."""
        record = self.records.get(unit)
        return None if record is None else record.call

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
        record = self.records.get(unit)
        if record is None or record.call is None or record.stage is not Stage.ACTIVE:
            _check_unchanged(unit, call)
            if record is None or record.stage is not Stage.ACTIVE:
                record = self._activate(unit)
            if record.call is None:
                record.call = call
            if self.reductions.reducing and not self.reductions.overlaps(unit):
                self.reductions.make_room()
            if unit.plan.unshards_in_backward:
                unit.begin_unshard(full_precision=call.full_precision)
            if not (unit.plan.free_after_forward and any(each.call is None for each in self.expected.values())):
                # Nothing more is gathered: gradients can have the pooled memory of full parameters.
                self.tree.pool.trim()
            for lender in unit.links.lenders:
                # A lender in a different tree has its own pass.
                if lender.observers.fingerprint is self.tree.fingerprint and not self._is_active(lender):
                    self._hook_the_rest(self._activate(lender))
            self._prefetch(unit, BackwardOrder.BEFORE_COMPUTE)
            if unit.plan.unshards_in_backward:
                unit.finish_unshard()
        if call.lent:
            self._have_lent(record, call)
        record.inputs.update(_last_to_arrive(call))
        # If gradients are enabled, each gradient has a graph, which is watched too.
        if torch.is_grad_enabled() or (not record.inputs and not self._is_last(unit, call)):
            self._hook_the_rest(record)
        # Without an input to wait for, nothing says when a reentrant recomputation inside last needs the parameters;
        # and in the graph of a gradient nothing says which node reads them last.
        record.keeps_parameters = record.keeps_parameters or again or not call.inputs

    def _is_active(self, unit: Unit) -> bool:
        record = self.records.get(unit)
        return record is not None and record.stage is Stage.ACTIVE

    def _have_lent(self, record: UnitBackward, call: ForwardCall) -> None:
        """Have the full parameters that `call` has read of other units in place, until its unit is complete."""
        for lender in call.lent:
            if lender not in record.lent:
                record.unit.borrow(lender, lender.name)
                record.lent.append(lender)
                lender.unshard(full_precision=call.full_precision)
                if not self._is_active(lender):
                    self._hook_the_rest(self._activate(lender))

    def _is_last(self, unit: Unit, call: ForwardCall) -> bool:
        """Return whether only the end of the pass waits for `unit`.

        The code around the outermost unit may use its parameters too, and only their gradients tell of that.
        """
        return not call.is_top and next(reversed(self.expected), None) is unit

    def gradient_arrived(self, unit: Unit, number: int, index: int) -> None:
        """The gradient of parameter `index` of the unit's flat parameter `number` is finished."""
        record = self.records.get(unit)
        if record is None or record.stage is not Stage.ACTIVE:
            record = self._activate(unit)
        handle, averaging = unit.handles[number], record.averaging
        if record.keeps:
            handle.keep([index], divisor=averaging.before)
        else:
            handle.deposit(index, divisor=averaging.before, weight=averaging.weight)
        key = (number, index)
        # In a different autograd run, more of this gradient may follow.
        if key in record.leaves and current_run() == record.run:
            record.leaves.discard(key)
            self._complete_if_done(record)

    def input_arrived(self, unit: Unit, token: object) -> None:
        """The gradient of an input of `unit` is finished."""
        record = self.records.get(unit)
        if record is not None and record.stage is Stage.ACTIVE and token in record.inputs:
            record.inputs.discard(token)
            self._complete_if_done(record)

    # Consequences of the reports

    def _complete_if_done(self, record: UnitBackward) -> None:
        if record.leaves or record.inputs or current_run() != record.run:
            return
        self._hook_the_rest(record)
        if not record.leaves and not (record.keeps_parameters and self._is_alone(record)):
            self._complete(record)

    def _is_alone(self, record: UnitBackward) -> bool:
        """Whether the pass waits for no other unit: `finish` comes next, which frees parameters before it collects."""
        waiting = (Stage.EXPECTED, Stage.ACTIVE)
        return not any(each.stage in waiting and each is not record for each in self.records.values())

    def _hook_the_rest(self, record: UnitBackward) -> None:
        """Hook the leaves whose gradients are still to come: this pass and every later one waits for them."""
        if record.trained is None:
            record.trained = _trained(record.unit)
        for number, _, watch in record.trained:
            missing = watch.missing()
            if missing:
                watch.hook(missing)
                record.leaves.update((number, index) for index in missing)

    def _collect(self, record: UnitBackward) -> None:
        """Take the gradients of leaves without a hook, and those that were kept."""
        unit, averaging = record.unit, record.averaging
        # Wait before one more buffer is taken; the reduction would have to wait anyway.
        syncs = unit.reducer.synchronises
        trained = _trained(unit) if record.trained is None else record.trained
        if self.reductions.reducing and syncs and (trained or unit.reducer.unsynced):
            self.reductions.make_room()
        for _, handle, watch in trained:
            if averaging.weight != 1.0:
                for index in watch.unhooked:
                    handle.deposit(index, divisor=averaging.before, weight=averaging.weight)
                continue
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
        unit.move(Phase.BACKWARD)
        record = self.records.get(unit)
        if record is None:
            record = self.records[unit] = UnitBackward(
                unit, hooked_leaves_to_come(leaf_watches(unit.handles)), current_run()
            )
        elif record.stage is not Stage.EXPECTED:
            # A gradient reaches it again: the collected gradients stay.
            if record.stage is Stage.COMPLETE:
                self.ready.remove(record)
            record.leaves, record.run = hooked_leaves_to_come(leaf_watches(unit.handles)), current_run()
            record.inputs.clear()
            record.trained = None
        record.move(Stage.ACTIVE)
        if compiles():
            unit.held.note_backward(True)
        averaging = record.averaging = unit.reducer.averaging(unit.handles)
        keeps = (averaging.in_parts and unit.reducer.synchronises) or self.reductions.runs_ahead
        record.keeps = keeps and averaging.weight == 1.0
        return record

    def _prefetch(self, unit: Unit, when: BackwardOrder) -> None:
        plan, listed = unit.plan.prefetch, unit.links.backward_prefetch
        # What the user has listed is gathered before the unit computes, whatever the plan says.
        if when is not (plan.backward if listed is None else BackwardOrder.BEFORE_COMPUTE):
            return
        if listed is None:
            self._gather_ahead(when, self.forward.before(unit), plan.backward_depth)
        else:
            self._gather_ahead(when, listed, len(listed))

    @profiled(lambda self, when, *_: _PREFETCHES[when])
    def _gather_ahead(self, when: BackwardOrder, units: Iterable[Unit], count: int) -> None:
        # What is gathered now would stay in memory, and go stale, until the next pass.
        if self.has_computed:
            return
        for unit in units:
            if not count:
                return
            if self.call_of(unit) is None and unit.plan.unshards_in_backward:
                unit.begin_unshard(full_precision=unit.computes_in_full_precision)
                count -= 1

    @profiled(lambda self, record: _LEAVES[bool(record.unit.trainable)])
    def _complete(self, record: UnitBackward) -> None:
        unit = record.unit
        record.move(Stage.COMPLETE)
        if unit.held.in_backward:
            unit.held.note_backward(False)
        self.expected.pop(unit, None)
        if not record.keeps_parameters:
            self._free(unit)
        for lender in unit.links.lenders:
            if not self._is_active(lender):
                self._free(lender)
        if record.lent:
            record.give_back()
        # Collect only now: the buffer of the gradients may take the memory of the full parameters.
        self._collect(record)
        unit.move(Phase.IDLE)
        if not unit.reducer.synchronises:
            unit.reducer.unsynced.update(unit.trainable)
            if unit.reducer.sums is not None:
                unit.reducer.sums.collect(unit.handles)
        if not (unit.reducer.synchronises and unit.reducer.sums_copies):
            note_waiting(unit)
        self.ready.append(record)
        self._reduce_ready()

    def _free(self, unit: Unit) -> None:
        """Free the full parameters, unless an active unit borrows some."""
        is_lent = not self.has_computed and any(map(self._is_active, unit.links.borrowers))
        # Another graph, or that of a gradient, may have full parameters for a backward pass to come.
        is_last = self.callback() is not None and len(self.tree.graphs) <= 1
        is_computed = is_last and not torch.is_grad_enabled()
        free(unit, Juncture.COMPLETE, is_kept=is_lent, is_computed=is_computed)

    def _reduce_ready(self, *, all_of_them: bool = False) -> None:
        """Issue the reductions whose turn has come: of the complete units, the last to begin first."""
        place = self.forward.place
        awaited = -1 if all_of_them or not self.expected else place(next(iter(self.expected)))
        # Most wait alone.
        if len(self.ready) > 1:
            self.ready.sort(key=lambda record: place(record.unit), reverse=True)
        while self.ready and place(self.ready[0].unit) >= awaited:
            record = self.ready.pop(0)
            record.move(Stage.DONE)
            self._prefetch(record.unit, BackwardOrder.AFTER_COMPUTE)
            if record.unit.reducer.synchronises:
                self.reductions.issue(record.unit, record.averaging)

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
        for unit in self.tree.units:
            # No hook reported the unit: its outputs hide their tensors.
            if not self._is_active(unit) and _has_gradients_left(unit):
                self._activate(unit)
        for unit in self.tree.units:
            # Full parameters that were kept for the whole pass, prefetched in vain, or used in the forward pass only.
            if unit.gather is not None:
                self._free(unit)
        for record in [each for each in self.records.values() if each.stage is Stage.ACTIVE]:
            self._complete(record)
        self._reduce_ready(all_of_them=True)
        for unit in self.tree.units:
            # The gradients were collected earlier, and this pass has not reached the unit.
            if unit.reducer.synchronises and unit.reducer.unsynced and unit.phase is Phase.IDLE:
                self.reductions.issue(unit, unit.reducer.averaging(unit.handles))
        self.reductions.settle()
        if self.reductions.has_begun:
            self.comparison = self.reductions.give_held(self.tree.units, self.tree.fingerprint)
        self.tree.end_backward(self.reductions.has_begun)

    def drop(self) -> None:
        """Drop everything after an exception; wait for the reductions in flight, since they own memory."""
        self.reductions.drop()
        for record in self.records.values():
            record.give_back()
        self.records.clear()
        self.ready.clear()


def _check_unchanged(unit: Unit, call: ForwardCall) -> None:
    stamp = 0
    for handle in unit.handles:
        if handle.residency is Residency.UNSHARDED:
            handle.check_leaves()
        stamp += handle.stamp()
    if call.stamp != stamp:
        raise FlatParamError(
            f"unit {unit.name!r} on rank {unit.topology.rank}: its parameters were changed (by an optimizer "
            "step, by loading, or in place) between its forward pass and the backward pass through it; run backward "
            "first"
        )


def _last_to_arrive(call: ForwardCall) -> Collection[object]:
    """Return the inputs of `call`, as tokens, whose gradients tell that the unit's backward is over.

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


def _trained(unit: Unit) -> Sequence[WatchedHandle]:
    return [each for each in leaf_watches(unit.handles) if each[1].exposure.is_trainable]


def _has_gradients_left(unit: Unit) -> bool:
    watches = (watch for _, _, watch in leaf_watches(unit.handles))
    return any(watch.leaves[index].grad is not None for watch in watches for index in watch.unhooked)
