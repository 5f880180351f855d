"""The units below one root, and their running passes."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Iterator, Sequence
from types import FrameType
from typing import Final, final

import attrs
import torch
from torch import nn
from typing_extensions import Self

from flatparam_comm import BufferPool, FlatParamError, FlatParamHandle, NoStreams, OnDevice, clean_fqn, streams_of
from flatparam_runtime.agreement.comparison import Comparison, compare_inference
from flatparam_runtime.agreement.divergence import agree_on_deed
from flatparam_runtime.agreement.fingerprint import Fingerprint, Progress
from flatparam_runtime.agreement.nonfinite import NonfiniteGuard
from flatparam_runtime.agreement.units import agree_on_units, warn_of_newcomers
from flatparam_runtime.autograd import CALL, in_backward, is_traced, profiled, transforms
from flatparam_runtime.passes.backward import BackwardPass
from flatparam_runtime.passes.freeing import Juncture, free
from flatparam_runtime.passes.record import ForwardPass, next_forward
from flatparam_runtime.passes.reductions import Reductions
from flatparam_runtime.unit import (
    TREE,
    ForwardCall,
    InnerCall,
    Phase,
    Unit,
    broadcast_buffers,
    device_of,
    revive_units,
    running_calls,
    unit_of,
)

ROOT_NAME = "(root)"
"""The name of the root unit in labels, events and messages."""


@final
@attrs.define(eq=False)
class UnitTree:
    """A root unit and the units below it, made when the first forward pass of the root begins.

    `forward` and `backward` hold the state of one pass, and are `None` between passes.
    """

    units: tuple[Unit, ...]
    """The root comes first."""
    forward: ForwardPass | None = None
    last_forward: ForwardPass | None = None
    """The previous forward pass; prefetching expects the same order again."""
    keeps_unsharded: bool = False
    """Whether full parameters in memory between passes may be used as they are, after an unsynced backward pass."""
    fingerprint: Fingerprint = attrs.field(factory=Fingerprint)
    """The fingerprint of the collectives of all units."""
    pool: BufferPool = attrs.field(factory=lambda: BufferPool(keeps=False))
    """Memory of the full parameters and unsharded gradients of all units, during a pass."""
    streams: OnDevice = attrs.field(factory=NoStreams)
    """The streams of the device that the units compute on."""
    comparison: Comparison | None = None
    """The comparison of the ranks after the last pass, until it is checked."""
    lends: bool = False
    """Whether its units lend parameters that a forward call of another unit reads."""
    graphs: weakref.WeakSet[ForwardCall] = attrs.field(factory=weakref.WeakSet)
    """The outermost calls that autograd has recorded, and whose graph somebody has for a backward pass to come."""
    _backward: BackwardPass | None = None

    def __reduce__(self) -> tuple[object, ...]:
        # A copy of the modules gets a tree of its own.
        return _nothing, ()

    @classmethod
    def grow(cls, root: Unit) -> Self:
        """Return the tree of `root`, to which every unit below `root` belongs from now on, even a former root."""
        revive_units(root.module)
        modules = root.module.named_modules()
        named = [(clean_fqn(name), unit) for name, module in modules if (unit := unit_of(module)) is not None]
        tree = cls(tuple(unit for _, unit in named))
        tree.fingerprint.before_each = agree_on_deed
        guard = NonfiniteGuard.by(unit.plan.nonfinite for unit in tree.units)
        for number, (name, unit) in enumerate(named):
            unit.join(name or ROOT_NAME, number, tree.fingerprint)
            unit.observers.guard = guard
            unit.module.__dict__[TREE] = tree
            for handle in unit.handles:
                handle.use_pool(tree.pool)
        return tree

    @property
    def root(self) -> Unit:
        """The unit that no other one of the tree is around."""
        return self.units[0]

    @property
    def guard(self) -> NonfiniteGuard | None:
        """The guard against gradients that are not finite; None if no unit asks for it."""
        return self.units[0].observers.guard

    @property
    def backward(self) -> BackwardPass | None:
        """The backward pass that has begun and not finished; an exception may have interrupted it."""
        return self._backward

    def living_backward(self) -> BackwardPass | None:
        """The running backward pass. One that an exception interrupted is dropped, if autograd has let go of it."""
        if self._backward is not None and self._backward.callback() is None:
            self.recover()
        return self._backward

    def begin_backward(self) -> BackwardPass:
        """Return a new backward pass, while none is alive; only hooks that the autograd engine runs may call this."""
        self._look_at_comparison()
        self.pool.keeps = True
        self._backward = BackwardPass.begin(self)
        return self._backward

    def end_backward(self, synced: bool) -> None:
        """Forget the backward pass, which has finished."""
        ended, self._backward = self._backward, None
        if ended is not None:
            self.graphs.difference_update(ended.calls)
        self._end_pooling()
        if ended is not None and not self.streams.is_capturing:
            self._compare(ended.comparison)
        self.keeps_unsharded = not synced
        # From here on one comparison at the end of each backward is enough.
        if synced:
            self.fingerprint.advance(Progress.TRAINED)
            self.fingerprint.before_each = None
        if self.guard is not None and ended is not None and ended.comparison is not None:
            # The host waits: the next thing may be a step.
            self.check_comparison()
            self.guard.judge(self.units, ended.comparison.found_nonfinite)

    @property
    def is_in_a_pass(self) -> bool:
        """Whether a forward or backward pass is running, or one that an exception interrupted has left something."""
        return self._backward is not None or self._has_begun_forward

    @property
    def _has_begun_forward(self) -> bool:
        return self.forward is not None or any(unit.calls for unit in self.units)

    def drop_remains(self) -> None:
        """Drop what a pass that an exception interrupted has left; a running pass goes on."""
        if self._backward is not None and self.streams.runs_ahead:
            self._backward.wait_if_dying()
        if self.living_backward() is None and self._has_begun_forward and not self._runs_a_call:
            self.recover()

    @property
    def innermost(self) -> Unit | None:
        """The unit whose forward call is the innermost one on the stack of this thread."""
        calling = (unit for unit in reversed(self.units) if unit.calls)
        return next((unit for unit in calling if running_calls(unit.calls[-1].module)), None)

    @property
    def _runs_a_call(self) -> bool:
        """Whether a call of a unit is on the stack of this thread."""
        return any(running_calls(call.module) for unit in self.units for call in unit.calls)

    @profiled("_root_pre_forward")
    def begin_forward(self) -> None:
        """Begin a forward pass: a unit is called outside of any other unit's call. The remains of earlier passes go.

        Raises:
            FlatParamError: while full parameters are summoned, or state is saved or loaded; or inside a transform of
                `torch.func`, but for `vmap` without gradients after a first pass.
        """
        under = transforms()
        if under:
            self._check_transforms(under)
        self._check_tracing()
        for unit in self.units:
            if unit.showing.away:
                unit.showing.check_here(unit.name, unit.topology.rank)
            if unit.phase is Phase.INSPECTING:
                raise FlatParamError(
                    f"unit {unit.name!r}: a forward pass cannot begin while its state is saved or loaded, or its full "
                    "parameters are summoned on one rank, on the CPU or with gradients; leave that context first"
                )
        if self.living_backward() is None:
            self._settle_leftovers()
        self._check_capture()
        if self.streams.runs_ahead:
            self._look_at_comparison()
        else:
            self.check_comparison()
        self.introduce()
        for unit in self.units:
            unit.cast_buffers()
        if self.root.plan.broadcast_buffers and self.root.module.training and torch.is_grad_enabled():
            broadcast_buffers(self.root.module, self.root.topology)
        self.pool.keeps = True
        before, recorded = self.last_forward or ForwardPass(), torch.is_grad_enabled()
        calls_before = len(before.ended) if before.recorded else before.calls_before
        self.forward = ForwardPass(recorded, self.streams.current(), calls_before)
        self.fingerprint.begin_pass(recorded=recorded, before_each=agree_on_deed)

    def introduce(self) -> None:
        """Have the ranks compare their units, if they never did; every rank calls it before each pass."""
        if self.fingerprint.progress is Progress.NEW:
            check_no_graphs(self.root, self.units)
            agree_on_units(self.units)
            for unit in self.units:
                # A new object in the place of an original is no newcomer.
                unit.take_over()
            self.fingerprint.advance(Progress.BEGUN)
        if self.fingerprint.has_new_optimizer and torch.is_grad_enabled():
            self.fingerprint.has_new_optimizer = False
            warn_of_newcomers(self.units)

    def settle_leftovers(self) -> None:
        """Free full parameters that may not be used between passes any more, as the next forward pass would."""
        self.drop_remains()
        self._settle_leftovers()

    def reduce_waiting(self) -> None:
        """Reduce the gradients that passes without synchronisation have collected; every rank calls it, between passes.

        Ranks that have collected nothing add zeros. Full parameters are freed, as at the end of a backward pass.
        """
        self.fingerprint.begin_pass(recorded=True, before_each=agree_on_deed)
        for unit in self.units:
            unit.reducer.unsynced.update(unit.trainable)
        self.pool.keeps = True
        current = BackwardPass(self, self.latest_forward, Reductions(self.streams.runs_ahead), {})
        self._backward = current
        current.finish()

    def _check_transforms(self, under: Sequence[str]) -> None:
        told = f"unit {self.root.name!r}: its forward pass is inside a transform of torch.func ({', '.join(under)})"
        if set(under) != {"vmap"}:
            # What it computes with is hidden from collectives, also without gradients.
            raise FlatParamError(
                f"{told}, whose tensors no collective can read; use autograd, with create_graph=True for higher "
                "derivatives, or torch.autograd.forward_ad, or transform the model before it is sharded"
            )
        if torch.is_grad_enabled() or not self.fingerprint.compares_at_end:
            raise FlatParamError(
                f"{told}, for whose tensors autograd calls no hooks; call the model under torch.no_grad(), after a "
                "first pass outside (a training one with its backward), or transform it before it is sharded"
            )

    def _check_tracing(self) -> None:
        """An export may follow a pass that the ranks have compared; then it exchanges nothing of its own."""
        how = "torch.jit.trace()" if is_traced() else ""
        if torch.compiler.is_exporting() and self.fingerprint.progress is Progress.NEW:
            how = "torch.export.export(), and is the first one"
        if how and self.root.topology.data_parallel_size > 1:
            raise FlatParamError(
                f"unit {self.root.name!r}, rank {self.root.topology.rank}: its forward pass is inside {how}, which "
                "cannot record what the ranks tell each other; load model.state_dict() into a model that is not "
                "sharded, and trace or export that one"
            )

    def _check_capture(self) -> None:
        self.streams = streams_of(device_of(self.units))
        if self.streams.is_capturing and not self.fingerprint.compares_at_end:
            raise FlatParamError(
                f"unit {self.root.name!r}: its first pass is being captured in a graph, but in the first pass the host "
                "has to compare what the ranks do; run a few steps on a side stream before the capture"
            )

    def to_come(self, unit: Unit) -> Iterator[Unit]:
        """Return the units with parameters whose forward calls are expected after that of `unit`, which begins now.

        These are the units that followed it in the previous pass, or in the first pass the units registered after it.
        Once the pass takes a different way, none are expected, so that only a few are ever gathered in vain.
        """
        assert self.forward is not None, "it is asked for inside a forward pass"
        before = self.units if self.last_forward is None else self.last_forward.began
        if self.last_forward is None and (*self.forward.began,) != self.units[: len(self.forward.began)]:
            return iter(())
        expected = next_forward(before, self.forward.began, len(self.units))
        return (other for other in expected if other.handles and self.forward.place(other) < 0)

    def end_forward(self) -> None:
        """End the forward pass, when the outermost unit's forward call is over.

        Raises:
            DivergenceError: if the ranks have run different units, and no backward follows, which would compare.
        """
        ended, self.forward = self.forward, None
        self.last_forward = ended
        if ended is None:
            return
        if ended.recorded:
            return
        # No backward pass follows.
        self._end_pooling()
        # The host may write its parameters next.
        if any(unit.plan.storage_device is not None for unit in self.units):
            self.streams.wait_for_uploads()
        if not self.fingerprint.is_empty and not self.streams.is_capturing:
            self._compare(compare_inference(self.units, self.fingerprint))
            self.fingerprint.advance(Progress.INFERRED)

    def _compare(self, comparison: Comparison | None) -> None:
        """Check the previous comparison; check this one in the next pass, or now on the CPU and in the first passes.

        By the next comparison the result has long arrived from an accelerator, and the host has read it when the next
        pass or its backward began. Every rank raises a divergence in the same place, whenever it read the result,
        because it then communicates with the others.
        """
        self.check_comparison()
        self.comparison = comparison
        if not self.streams.runs_ahead or not self.fingerprint.compares_at_end:
            self.check_comparison()

    def _look_at_comparison(self) -> None:
        """Read the comparison if it has arrived, so that nothing has to wait for it later."""
        if self.comparison is not None and not self.streams.is_capturing:
            self.comparison.look()

    def check_comparison(self) -> None:
        """Check the comparison of the ranks; wait for it if it has not arrived.

        Raises:
            DivergenceError: on every rank, if the ranks diverge.
        """
        comparison, self.comparison = self.comparison, None
        if comparison is not None:
            comparison.check()

    def _end_pooling(self) -> None:
        self.pool.keeps = False
        self.pool.clear()

    @property
    def latest_forward(self) -> ForwardPass:
        """The running forward pass, or the previous one: what a backward pass that begins now differentiates."""
        return self.forward or self.last_forward or ForwardPass()

    def _settle_leftovers(self) -> None:
        kept = self.keeps_unsharded
        for unit in self.units:
            if unit.phase is not Phase.IDLE:
                unit.reset(drop_gradients=False)
            # Every rank must decide alike, and does. In a pipeline several forward passes come before a backward pass.
            elif not free(unit, Juncture.PASS_BEGINS, is_kept=kept or not unit.reducer.synchronises):
                unit.follow_training()

    def recover(self) -> None:
        """Bring every unit back to rest after an exception: sharded, idle, without gradients of a failed backward."""
        dead, self._backward, self.forward = self._backward, None, None
        if dead is not None:
            dead.drop()
            if self.guard is not None:
                self.guard.drop()
        for unit in self.units:
            if unit.phase is not Phase.INSPECTING:
                unit.reset(drop_gradients=dead is not None)
        self._end_pooling()
        self.keeps_unsharded = False


def _nothing() -> None:
    """`None`, which a copy of a module has instead of a tree."""


def tree_of(unit: Unit) -> UnitTree:
    """Return the tree that `unit` belongs to; if it has none yet, a new one with `unit` as its root."""
    module = unit.held.reference()
    tree: UnitTree | None = None if module is None else module.__dict__.get(TREE)
    return UnitTree.grow(unit) if tree is None else tree


def tree_and_backward(unit: Unit) -> tuple[UnitTree, BackwardPass | None]:
    """The tree of a unit whose forward call begins now, and the backward pass that the call is inside of, if any.

    The remains of a backward pass that an exception interrupted are dropped first.
    """
    tree = tree_of(unit)
    backward = tree.living_backward()
    # This pass was interrupted too, but autograd's own threads have not freed it yet.
    if backward is not None and not in_backward():
        tree.recover()
        backward = None
    return tree, backward


_CALLS: Final = {nn.Module._call_impl.__code__, nn.Module._wrapped_call_impl.__code__}
"""The code of torch's functions that call a module, which is their `self`."""
_SETTINGS: Final = "get_compiler_config"
"""The attribute of what `torch.compile` made: a function that returns Inductor's settings, if Inductor compiles it."""


def check_no_graphs(root: Unit, units: tuple[Unit, ...]) -> None:
    """Refuse CUDA graphs of the compiler that would contain parameters of `units`, if these are gathered in each pass.

    Seen are modules of the model, and those from whose calls this is called.

    Raises:
        FlatParamError: naming the module.
    """
    if root.device.type in ("cpu", "meta"):
        # Inductor makes none.
        return
    moving = [handle for unit in units for handle in unit.handles if _moves(handle)]
    holders = {info.module for handle in moving for infos in handle.param_infos for info in infos}
    for name, module in itertools.chain(root.module.named_modules(), _calling()):
        if _has_graphs(module) and not holders.isdisjoint(module.modules()):
            told = clean_fqn(name) or type(module).__name__
            raise FlatParamError(
                f"unit {root.name!r}, rank {root.topology.rank}: module {told!r} is compiled with CUDA graphs "
                "(mode='reduce-overhead' or 'max-autotune', or the option 'triton.cudagraphs'), which expect each "
                "parameter at one address, but full parameters are gathered to other memory in each pass: a graph is "
                "recorded again for each address, and may give out a parameter of another unit; compile without, for "
                "example with mode='max-autotune-no-cudagraphs', or capture the whole step"
            )


def _moves(handle: FlatParamHandle) -> bool:
    """Return whether full parameters have memory of their own, and not that of the flat parameter."""
    is_lent = handle.is_whole and not (handle.is_offloaded or handle.exposure.lists_shard)
    dtype = handle.layout.dtype
    return not (is_lent and handle.precision.compute(dtype) == dtype)


def _has_graphs(module: nn.Module) -> bool:
    compiled = vars(module).get(CALL)
    if isinstance(compiled, InnerCall):
        compiled = compiled.own
    settings = vars(module).get(_SETTINGS) or getattr(compiled, _SETTINGS, None)
    found = settings() if settings is not None else None
    return bool(found and found.get("triton.cudagraphs"))


def _calling() -> list[tuple[str, nn.Module]]:
    """Return the modules whose calls are under way in this thread."""
    found: list[tuple[str, nn.Module]] = []
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        # No other frames: a look at the locals of one leaves it a copy, which holds them for as long as it runs.
        if frame.f_code in _CALLS:
            found.append(("", frame.f_locals["self"]))
        frame = frame.f_back
    return found
